"""What is special about single codecs: bounds, bytes, options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from farflung.codecs import (
    CODECS,
    DGC,
    QSGD,
    ChunkedTopK,
    DeMo,
    Identity,
    Int8,
    RandomK,
    Sign,
    TopK,
    Truncate16,
    by_role,
    by_size,
    chain,
    error_feedback,
)
from farflung.codecs import stochastic as stochastic_module
from farflung.errors import ConfigError, Unsupported
from farflung.seeding import generator
from farflung.types import Codec, CodecState, Payload, Placed, Seeds, TensorSpec
from tests.covering import covered
from tests.helpers import raw, same_bits, same_payload

SEEDS = Seeds(1, 2)


def normal(numel: int, *labels: int) -> Tensor:
    return torch.randn(numel, generator=generator(7, *labels))


def there_and_back(codec: Codec, grad: Tensor, seeds: Seeds = SEEDS, step: int = 0) -> tuple[Tensor, Payload]:
    spec = TensorSpec.of(grad)
    payload, state = codec.encode(codec.init(spec, seeds), grad, step=step, count=1)
    return codec.decode(state, payload, spec, step=step, count=1), payload


# --- what is refused --------------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[], object]] = {
    "above 0 and at most 1": lambda: TopK(0.0),
    "density 1.5": lambda: TopK(1.5),
    "density nan": lambda: RandomK(math.nan),
    "density '1%'": lambda: RandomK("1%"),  # type: ignore[arg-type]
    "dgc: density -0.1": lambda: DGC(-0.1),
    "momentum 1.0": lambda: DGC(momentum=1.0),
    "warmup_steps -1": lambda: DGC(warmup_steps=-1),
    "bits 1 must be 2 to 8": lambda: QSGD(bits=1),
    "bits 9": lambda: QSGD(bits=9),
    "bits 4.0 must be a whole number": lambda: QSGD(bits=4.0),  # type: ignore[arg-type]
    "levels 0": lambda: QSGD(levels=0),
    "levels 128": lambda: QSGD(levels=128),
    "bits or levels, not both": lambda: QSGD(bits=4, levels=7),
    "qsgd: bucket_size 0 must be at least 1": lambda: QSGD(bucket_size=0),
    "norm 'l3'": lambda: QSGD(norm="l3"),  # type: ignore[arg-type]
    "sign: bucket_size 0": lambda: Sign(0),
    "int8: bucket_size 0": lambda: Int8(bucket_size=0),
    "rounding 'up'": lambda: Int8("up"),  # type: ignore[arg-type]
    "numel -1": lambda: by_size(numel=-1),
    "demo: decay 1 must be": lambda: DeMo(decay=1),
    "demo: chunk 257 must be 1 to 256": lambda: DeMo(chunk=257),
    "demo: keep 0 must be at least 1": lambda: DeMo(keep=0),
    "error_feedback: decay 0.0 must be above 0 and at most 1": lambda: error_feedback(decay=0.0),
    "chunked_topk: density 2 must be above 0": lambda: ChunkedTopK(density=2),
    "chunked_topk: chunk 0 must be 1 to 65536": lambda: ChunkedTopK(chunk=0),
    "chunked_topk: bits 5 must be 1 to 4": lambda: ChunkedTopK(bits=5),
    "error_feedback is made of codecs, not of 0.1": lambda: error_feedback(0.1),  # type: ignore[arg-type]
    "chain is made of codecs": lambda: chain(TopK(), "int8"),  # type: ignore[arg-type]
    "by_role is made of codecs": lambda: by_role(3),  # type: ignore[arg-type]
    "by_size is made of codecs": lambda: by_size("x"),  # type: ignore[arg-type]
    "grow by n/k": lambda: error_feedback(RandomK()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_options_are_refused_when_it_is_made(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()


def test_a_chain_may_not_end_in_a_memory() -> None:
    with pytest.raises(Unsupported, match="keeps more than seeds"):
        chain(TopK(), error_feedback(Int8())).init(TensorSpec((5,)), SEEDS)


@pytest.mark.parametrize("codec", [TopK(), RandomK(), DGC()])
def test_more_entries_than_an_int32_can_name_are_refused(codec: Codec) -> None:
    with pytest.raises(Unsupported, match="by int32"):
        codec.init(TensorSpec((2**31,)), SEEDS)


@pytest.mark.parametrize("name", sorted(CODECS.keys() - {"identity", "by_role", "by_size"}))
def test_whole_numbers_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=r"float32 gradients|floating gradients"):
        CODECS[name]().init(TensorSpec((5,), torch.int64), SEEDS)


# --- other dtypes, other devices --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_keep_theirs(name: str, dtype: torch.dtype) -> None:
    grad = normal(100).to(dtype)
    decoded, payload = there_and_back(CODECS[name](), grad)
    assert decoded.dtype == dtype
    assert payload.nbytes <= max(grad.nbytes, 8)
    assert decoded.isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_nothing_waits_for_another_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ``meta`` there are no numbers: whatever asked for one, or made a shape of one, would fail."""
    monkeypatch.setattr("farflung.codecs.int8.generator_on", lambda *_: None)
    monkeypatch.setattr("farflung.codecs.qsgd.generator_on", lambda *_: None)
    codec, spec = CODECS[name](), TensorSpec((1000,))
    grad = torch.empty(1000, device="meta")
    payload, state = codec.encode(codec.init(spec, SEEDS), grad, step=0, count=1)
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    assert (decoded.device.type, decoded.shape) == ("meta", (1000,))
    assert all(tensor.device.type == "meta" for tensor in payload.tensors())


# --- qsgd -------------------------------------------------------------------------------------------------------


def bound(bucket_size: int, levels: int, norm: str) -> float:
    """Lemma 3.1 of Alistarh et al. 2017; with the maximum norm, from p (1 - p) <= 1/4."""
    quarter = 4 if norm == "max" else 1
    return min(bucket_size / (quarter * levels**2), math.sqrt(bucket_size) / levels)


@covered(
    "norm, levels, bucket_size, kind",
    ["l2", "max"],
    [1, 3, 7, 100],
    [1, 16, 100, 400],
    ["normal", "one large", "all equal"],
)
def test_the_variance_is_within_its_bound(norm: str, levels: int, bucket_size: int, kind: str) -> None:
    grad = {"normal": normal(400), "one large": 0.01 * normal(400), "all equal": torch.full((400,), 0.3)}[
        kind
    ]
    grad[200] += 10.0 * (kind == "one large")
    codec = QSGD(levels=levels, bucket_size=bucket_size, norm=norm)  # type: ignore[arg-type]
    errors = torch.stack([there_and_back(codec, grad, step=k)[0] - grad for k in range(200)]).double()
    mean, spread = errors.square().sum(dim=1).mean(), errors.square().sum(dim=1).std()
    most = bound(bucket_size, levels, norm) * grad.double().square().sum()
    assert mean <= most + 5 * spread / math.sqrt(200) + 1e-9


@pytest.mark.parametrize(("bits", "per_number"), [(2, 0.25), (3, 0.375), (4, 0.5), (8, 1.0)])
def test_bits_are_packed(bits: int, per_number: float) -> None:
    _, payload = there_and_back(QSGD(bits=bits, bucket_size=100), normal(8000))
    assert payload.nbytes == 8000 * per_number + 80 * 4


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (3, 3), (4, 4), (7, 4), (8, 5), (127, 8)])
def test_levels_take_the_bits_they_need(levels: int, bits: int) -> None:
    _, payload = there_and_back(QSGD(levels=levels, bucket_size=800), normal(800))
    assert payload.nbytes == 100 * bits + 4


@pytest.mark.parametrize("codec", [QSGD(), QSGD(levels=7)])
def test_four_bits_are_the_default_and_hold_seven_levels(codec: QSGD) -> None:
    (decoded, payload), (wanted, other) = (
        there_and_back(each, normal(800)) for each in (codec, QSGD(bits=4))
    )
    assert same_bits(decoded, wanted)
    assert payload.nbytes == other.nbytes


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_eight_bits_are_as_fine_for_a_small_tensor_beside_a_large_one(
    rounding: Literal["nearest", "stochastic"],
) -> None:
    small = 1e-4 * normal(8192)
    decoded, payload = there_and_back(Int8(rounding), torch.cat((normal(8192), small, normal(10))))
    assert (decoded[8192:16384] - small).norm() < 0.03 * small.norm()
    assert payload.nbytes == 16394 + 5 * 4
    coarse, _ = there_and_back(Int8(rounding, bucket_size=1 << 20), torch.cat((normal(8192), small)))
    assert (coarse[8192:] - small).norm() > 0.5 * small.norm()


@pytest.mark.parametrize("codec", [QSGD(), Int8("stochastic")])
def test_sums_of_one_step_are_rounded_by_noise_of_their_own(codec: Codec) -> None:
    """A replica may encode its own gradient and a sum that it is part of."""
    state = codec.init(TensorSpec((800,)), SEEDS)
    first, again, other = (
        raw(next(codec.encode(state, normal(800), step=0, count=count)[0].tensors())) for count in (1, 1, 2)
    )
    assert first == again != other


def test_the_largest_number_is_never_rounded_beyond_itself() -> None:
    """127 + u is 128 in float32 for a few draws in a million."""
    grad = torch.ones(2_000_000)
    assert torch.equal(there_and_back(Int8("stochastic"), grad)[0], grad)


def test_replicas_and_steps_round_apart() -> None:
    grad = normal(500)
    own = there_and_back(QSGD(), grad)[0]
    assert not torch.equal(own, there_and_back(QSGD(), grad, Seeds(1, 3))[0])
    assert not torch.equal(own, there_and_back(QSGD(), grad, step=1)[0])


# --- entries ----------------------------------------------------------------------------------------------------


def test_topk_sends_exactly_the_largest() -> None:
    grad = normal(1000)
    decoded, payload = there_and_back(TopK(0.05), grad)
    values, indices = payload.tensors()
    assert (values.dtype, indices.dtype, payload.nbytes) == (torch.float32, torch.int32, 50 * 8)
    threshold = grad.abs().sort().values[-50]
    assert torch.equal(decoded, torch.where(grad.abs() >= threshold, grad, 0.0))


def test_topk_sends_dense_where_indices_would_cost_more() -> None:
    grad = normal(100)
    decoded, payload = there_and_back(TopK(0.5), grad)
    assert payload.nbytes == grad.nbytes
    assert decoded.count_nonzero() == 50


def test_every_entry_has_its_turn_in_randomk() -> None:
    codec, spec = RandomK(0.2), TensorSpec((30,))
    states = [codec.init(spec, Seeds(1, own)) for own in (2, 3)]
    times = torch.zeros(30)
    for step in range(600):
        own, other = (codec.encode(state, torch.ones(30), step=step, count=1)[0] for state in states)
        decoded = codec.decode(states[0], own, spec, step=step, count=1)
        assert torch.equal(decoded, codec.decode(states[1], other, spec, step=step, count=1))
        assert decoded.count_nonzero() == 6
        times += decoded / 5
    assert ((times - 120).abs() <= 6 * math.sqrt(600 * 0.2 * 0.8)).all()


@pytest.mark.parametrize("numel", [1, 2, 3, 4, 12, 97, 360])
def test_randomk_takes_no_entry_twice(numel: int) -> None:
    codec = RandomK(1.0)
    for step in range(20):
        assert torch.equal(there_and_back(codec, normal(numel), step=step)[0], normal(numel))


# --- signs ------------------------------------------------------------------------------------------------------


def test_signs_and_the_mean_magnitude() -> None:
    grad = torch.tensor([1.0, -2.0, 3.0, -6.0, 0.0, 10.0])
    decoded, payload = there_and_back(Sign(4), grad)
    assert decoded.tolist() == [3.0, -3.0, 3.0, -3.0, 5.0, 5.0]
    assert payload.nbytes == 1 + 2 * 4


# --- dgc --------------------------------------------------------------------------------------------------------


def matrices() -> TensorSpec:
    return TensorSpec((100,), parts=(Placed((5, 8), 0), Placed((10,), 40), Placed((2, 25), 50)))


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_follows_its_equations(nesterov: bool) -> None:
    codec, spec = DGC(density=0.05, momentum=0.9, nesterov=nesterov, warmup_steps=0), matrices()
    state = codec.init(spec, SEEDS)
    u, v = torch.zeros(100), torch.zeros(100)
    for step in range(30):
        grad = normal(100, step)
        payload, state = codec.encode(state, grad, step=step, count=1)
        if nesterov:
            u = 0.9 * (u + grad)
            v = v + u + grad
        else:
            u = 0.9 * u + grad
            v = v + u
        mask = torch.zeros(100, dtype=torch.bool)
        for start, stop, k in ((0, 40, 2), (50, 100, 2)):
            mask[start + v[start:stop].abs().topk(k).indices] = True
        dense = torch.zeros(100, dtype=torch.bool)
        dense[40:50] = True
        wanted = torch.where(mask | dense, v, 0.0)
        v = torch.where(mask | dense, 0.0, v)
        u = torch.where(mask, 0.0, u)
        torch.testing.assert_close(codec.decode(state, payload, spec, step=step, count=1), wanted)
        torch.testing.assert_close(state.local["velocity"], u)
        torch.testing.assert_close(state.local["accumulated"], v)
        assert payload.nbytes == 4 * 8 + 10 * 4


def test_dgc_warms_up() -> None:
    codec = DGC(density=0.001, warmup_steps=50)
    densities = [round(codec.density_at(step), 4) for step in (0, 9, 10, 20, 30, 40, 49, 50, 10**6)]
    assert densities == [0.3162, 0.3162, 0.1, 0.0316, 0.01, 0.0032, 0.0032, 0.001, 0.001]


def test_dgc_forgets_what_is_not_finite() -> None:
    codec, spec = DGC(density=0.05, warmup_steps=0), matrices()
    grad = normal(100)
    grad[3], grad[45] = math.inf, math.nan
    payload, state = codec.encode(codec.init(spec, SEEDS), grad, step=0, count=1)
    assert codec.decode(state, payload, spec, step=0, count=1).isfinite().sum() == 98
    assert all(tensor.isfinite().all() for tensor in state.local.values())


# --- made of others ---------------------------------------------------------------------------------------------


def test_a_chain_encodes_values_and_leaves_indices() -> None:
    grad = normal(1000)
    chained, payload = there_and_back(chain(TopK(0.05), Int8()), grad)
    alone, _ = there_and_back(TopK(0.05), grad)
    assert payload.nbytes == 50 * (1 + 4) + 4
    assert (chained - alone).abs().max() <= grad.abs().max() / 254 * (1 + 1e-5)
    assert not chained[alone == 0].any()


def test_a_chain_of_three_is_a_chain_of_chains() -> None:
    grad = normal(1000)
    three, payload = there_and_back(chain(TopK(0.05), QSGD(bits=8), Truncate16()), grad)
    assert payload.nbytes == 50 * (1 + 4) + 2
    assert (three - there_and_back(TopK(0.05), grad)[0]).abs().max() <= grad.abs().max() / 50


def test_a_residual_is_sent_once() -> None:
    codec, spec = error_feedback(TopK(0.1)), TensorSpec((50,))
    state = codec.init(spec, SEEDS)
    given, sent = torch.zeros(50), torch.zeros(50)
    for step in range(40):
        grad = normal(50, step)
        given += grad
        if step % 3 == 2:  # a step that is not compressed
            dense, state = codec.flush(state, grad)
            sent += dense
            assert not state.local["residual"].any()
        else:
            payload, state = codec.encode(state, grad, step=step, count=1)
            sent += codec.decode(state, payload, spec, step=step, count=1)
    torch.testing.assert_close(sent + state.local["residual"], given, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("inner", [Identity(), by_role(), by_size()])
def test_a_codec_that_leaves_nothing_out_leaves_no_residual(inner: Codec) -> None:
    """Their payloads are views of what is encoded, which the residual must not be written over."""
    codec, spec = error_feedback(inner), TensorSpec((50,))
    payload, state = codec.encode(codec.init(spec, SEEDS), normal(50), step=0, count=1)
    assert not state.local["residual"].any()
    assert torch.equal(codec.decode(state, payload, spec, step=0, count=1), normal(50))


def test_a_residual_forgets_what_is_not_finite() -> None:
    grad = torch.tensor([1.0, math.nan, 3.0, -math.inf])
    for inner in (TopK(0.5), Sign(), Int8()):
        codec = error_feedback(inner)
        _, state = codec.encode(codec.init(TensorSpec((4,)), SEEDS), grad, step=0, count=1)
        assert state.local["residual"].isfinite().all()


def test_a_joiner_has_what_is_shared_and_no_residual() -> None:
    codec, spec = error_feedback(RandomK(0.5, unbiased=False)), TensorSpec((50,))
    state = codec.init(spec, Seeds(1, 2))
    for step in range(3):
        _, state = codec.encode(state, normal(50, step), step=step, count=1)
    assert state.local["residual"].any()
    joiner = CodecState(state.shared, codec.init(spec, Seeds(1, 9)).local)
    assert not joiner.local["residual"].any()
    payload, _ = codec.encode(state, normal(50), step=3, count=1)
    assert torch.equal(
        codec.decode(joiner, payload, spec, step=3, count=1),
        codec.decode(state, payload, spec, step=3, count=1),
    )


def test_roles_are_told_by_dimensions() -> None:
    parts = (
        Placed((2, 3, 1), 0),
        Placed((4,), 6),
        Placed((5, 2), 10),
        Placed((), 20),
        Placed((3, 1, 1, 3), 21),
    )
    spec = TensorSpec((30,), parts=parts)
    codec = by_role(TopK(0.1), Sign())
    routes = {route.name: list(map(list, route.runs)) for route in codec.routes(codec.init(spec, SEEDS))}
    assert routes == {"convolution": [[0, 6], [21, 9]], "other": [[10, 10]], "dense": [[6, 4], [20, 1]]}
    plain = by_role(TopK(0.1))  # matrices are sent as they are, so with the vectors
    routes = {route.name: list(map(list, route.runs)) for route in plain.routes(plain.init(spec, SEEDS))}
    assert routes == {"convolution": [[0, 6], [21, 9]], "dense": [[6, 15]]}
    grad = normal(30)
    payload, state = codec.encode(codec.init(spec, SEEDS), grad, step=0, count=1)
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    assert torch.equal(decoded[[6, 7, 8, 9, 20]], grad[[6, 7, 8, 9, 20]])
    assert torch.equal(decoded[10:20], there_and_back(Sign(), grad[10:20])[0])
    assert decoded[[*range(6), *range(21, 30)]].count_nonzero() == 2


def test_the_order_of_a_state_does_not_matter() -> None:
    """A checkpoint may give it back in another one."""
    spec = TensorSpec((30,), parts=(Placed((2, 5, 1), 0), Placed((2, 5), 10), Placed((10,), 20)))
    codec = by_role(TopK(0.1), Sign())
    state = codec.init(spec, SEEDS)
    turned = CodecState(dict(reversed(state.shared.items())), state.local)
    payloads = [codec.encode(kept, normal(30), step=0, count=1)[0] for kept in (state, turned)]
    assert same_payload(*payloads)


def test_parts_of_a_bucket_keep_their_shapes_inside() -> None:
    """DGC inside by_role still has a threshold for each weight."""
    parts = (Placed((2, 5, 1), 0), Placed((10,), 10), Placed((1, 10, 1), 20))
    codec = by_role(DGC(density=0.1, warmup_steps=0))
    state = codec.init(TensorSpec((30,), parts=parts), SEEDS)
    (conv, _) = codec.routes(state)
    assert conv.state.shared == {"sparse": [[0, 10], [10, 10]], "dense": []}


@pytest.mark.parametrize(("numel", "nbytes"), [(99, 396), (100, 104)])
def test_size_decides(numel: int, nbytes: int) -> None:
    assert there_and_back(by_size(Identity(), Int8(), 100), normal(numel))[1].nbytes == nbytes


def test_the_generator_is_seeded_by_its_labels() -> None:
    draws = [
        torch.rand(3, generator=stochastic_module.generator_on(torch.device("cpu"), 1, label)).tolist()
        for label in (1, 2, 1)
    ]
    assert draws[0] == draws[2] != draws[1]


# --- chunks -------------------------------------------------------------------------------------------------------


def test_each_chunk_sends_its_own_largest() -> None:
    grad = torch.tensor([9.0, -8.0, 7.0, 6.0, 0.1, 0.4, -0.3, 0.2, 5.0, 0.0])
    codec, spec = ChunkedTopK(0.5, chunk=4, bits=None), TensorSpec((10,))
    payload, state = codec.encode(codec.init(spec, SEEDS), grad, step=0, count=1)
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    assert decoded.tolist() == [
        9.0,
        -8.0,
        0.0,
        0.0,
        0.0,
        pytest.approx(0.4),
        pytest.approx(-0.3),
        0.0,
        5.0,
        0.0,
    ]


def test_two_bits_are_a_sign_and_one_of_two_means() -> None:
    grad = torch.zeros(4096)
    grad[torch.arange(0, 4096, 64)] = torch.tensor([1.0, 2.0, 9.0, 10.0, -1.0, -3.0, -8.0, -9.0]).repeat(8)
    codec, spec = ChunkedTopK(), TensorSpec((4096,))
    payload, state = codec.encode(codec.init(spec, SEEDS), grad, step=0, count=1)
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    assert decoded[::64][:8].tolist() == [1.5, 1.5, 9.5, 9.5, -2.0, -2.0, -8.5, -8.5]
    assert int(decoded.count_nonzero()) == 64
    assert payload.nbytes == 64 + 32 + 16 + 4 * 4  # twelve bits of index, two of code, four means


@pytest.mark.parametrize("chunk", [1, 2, 255, 256, 257, 4096, 1 << 16])
def test_indices_of_any_size_come_back(chunk: int) -> None:
    numel = 2 * chunk + 1
    grad = torch.randn(numel, generator=generator(3, chunk))
    codec, spec = ChunkedTopK(0.02, chunk=chunk, bits=None), TensorSpec((numel,))
    payload, state = codec.encode(codec.init(spec, SEEDS), grad, step=0, count=1)
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    rows = torch.nn.functional.pad(grad, (0, 3 * chunk - numel)).view(3, chunk)
    keep = max(1, round(0.02 * chunk))
    wanted = torch.zeros_like(rows).scatter_(1, rows.abs().topk(keep).indices, 1.0).view(-1)[:numel] * grad
    assert torch.equal(decoded, wanted)
    assert payload.nbytes <= grad.nbytes


def test_a_residual_that_decays_is_a_momentum_of_what_was_not_sent() -> None:
    codec, spec = error_feedback(TopK(0.1), decay=0.5), TensorSpec((50,))
    state, residual = codec.init(spec, SEEDS), torch.zeros(50)
    for step in range(5):
        grad = torch.randn(50, generator=generator(4, step))
        payload, state = codec.encode(state, grad, step=step, count=1)
        wanted = grad + 0.5 * residual
        residual = wanted - codec.decode(state, payload, spec, step=step, count=1)
        torch.testing.assert_close(state.local["residual"], residual)


# --- components ---------------------------------------------------------------------------------------------------


def waves(size: int) -> Tensor:
    """The orthonormal cosine transform by its definition, a component in each row."""
    rows = [
        [
            math.sqrt((1 if k == 0 else 2) / size) * math.cos(math.pi * k * (2 * i + 1) / (2 * size))
            for i in range(size)
        ]
        for k in range(size)
    ]
    return torch.tensor(rows)


def test_one_component_of_a_block_is_sent_whole_and_alone() -> None:
    codec = DeMo(0.9, chunk=8, keep=1)
    matrix = torch.outer(waves(8)[3], waves(6)[2]).repeat(2, 2) * torch.tensor(
        [[1.0], [-2.0]]
    ).repeat_interleave(8, 0)
    spec = TensorSpec((192,), parts=(Placed((16, 12), 0),))
    payload, state = codec.encode(codec.init(spec, SEEDS), matrix.reshape(-1), step=0, count=1)
    values, low, _ = payload.tensors()
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, -2.0, -2.0]))
    assert low.numel() == 6  # four indices of six bits, in a group of eight
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    torch.testing.assert_close(decoded.view(16, 12), matrix)
    assert float(state.local["components"].abs().max()) < 1e-6


def test_what_is_sent_leaves_the_momentum_and_the_rest_goes_on() -> None:
    codec, spec = (
        DeMo(0.8, chunk=4, keep=3),
        TensorSpec((60,), parts=(Placed((4, 2, 4), 0), Placed((28,), 32))),
    )
    state, momentum = codec.init(spec, SEEDS), torch.zeros(60)
    assert state.shared["blocks"] == [[0, 4, 8, 4, 4], [32, 1, 28, 1, 4]]
    for step in range(6):
        grad = torch.randn(60, generator=generator(5, step))
        payload, state = codec.encode(state, grad, step=step, count=1)
        sent = codec.decode(state, payload, spec, step=step, count=1)
        momentum = 0.8 * momentum + grad
        blocks = momentum[:32].view(4, 2, 4).transpose(0, 1)
        components = (waves(4) @ blocks @ waves(4).T).reshape(2, 16)
        largest = torch.zeros_like(components)
        largest.scatter_(1, components.abs().topk(3).indices, 1.0)
        wanted = (waves(4).T @ (largest * components).view(2, 4, 4) @ waves(4)).transpose(0, 1)
        torch.testing.assert_close(sent[:32].view(4, 2, 4), wanted)
        momentum = momentum - sent
        torch.testing.assert_close(codec.restored(state, state.local["components"]), momentum)
