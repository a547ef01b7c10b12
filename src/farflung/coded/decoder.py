import torch
class Plan:
    def __init__(self, who, rows): self.who, self.inv = who, torch.linalg.pinv(rows)
    def apply(self, answers):
        y = torch.stack([answers[w] for w in self.who])
        return list(torch.einsum("ka,arc->krc", self.inv, y))
class Decoder:
    def __init__(self, k, max_condition=1e6): self.k, self.rows, self.who = k, [], []
    def add(self, who, row): self.rows.append(row); self.who.append(who)
    @property
    def complete(self): return int(torch.linalg.matrix_rank(torch.stack(self.rows))) == self.k
    def plan(self): return Plan(self.who, torch.stack(self.rows))
