"""What is special about single codecs: bounds, bytes, options."""

from __future__ import annotations

import math
from collections.abc import Callable

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
from farflung.seeding import create_generator
from farflung.types import Codec, CodecState, ParameterSpan, Payload, Seeds, TensorSpec
from tests.covering import covered
from tests.helpers import same_bits, same_payload

SEEDS = Seeds(1, 2)


def normal(numel: int, *labels: int) -> Tensor:
    return torch.randn(numel, generator=create_generator(7, *labels))


def there_and_back(codec: Codec, grad: Tensor, seeds: Seeds = SEEDS, step: int = 0) -> tuple[Tensor, Payload]:
    spec = TensorSpec.from_tensor(grad)
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
    "around RandomK makes its errors grow with each step": lambda: error_feedback(RandomK()),
    "around RandomK makes its errors grow": lambda: error_feedback(chain(RandomK(), Int8())),
    "around RandomK makes its errors": lambda: error_feedback(by_size(large=RandomK())),
    "around QSGD makes its errors grow": lambda: error_feedback(QSGD(bits=4, norm="l2")),
    "around DGC keeps the same residual twice": lambda: error_feedback(DGC()),
    "around DeMo keeps the same residual twice": lambda: error_feedback(DeMo()),
    "around ErrorFeedback keeps the same residual twice": lambda: error_feedback(
        by_size(large=error_feedback())
    ),
}


def test_norms_whose_errors_fade_may_have_a_residual() -> None:
    for codec in (QSGD(bits=4), QSGD(bits=8, norm="l2"), RandomK(unbiased=False), RandomK(1.0)):
        error_feedback(codec)


@pytest.mark.parametrize("message", REFUSED)
def test_bad_options_are_refused_when_it_is_made(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()


def test_a_chain_may_not_end_in_a_memory() -> None:
    with pytest.raises(Unsupported, match="keeps more than seeds"):
        chain(TopK(), error_feedback(Int8())).init(TensorSpec((5,)), SEEDS)


@pytest.mark.parametrize("codec", [TopK(), RandomK(), DGC(), ChunkedTopK()])
def test_more_entries_than_an_int32_can_name_are_refused(codec: Codec) -> None:
    with pytest.raises(Unsupported, match="by int32"):
        codec.init(TensorSpec((2**31,)), SEEDS)


@pytest.mark.parametrize("name", CODECS)
def test_nothing_waits_for_another_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ``meta`` there are no numbers: whatever asked for one, or made a shape of one, would fail."""
    monkeypatch.setattr("farflung.codecs.int8.create_device_generator", lambda *_: None)
    monkeypatch.setattr("farflung.codecs.qsgd.create_device_generator", lambda *_: None)
    codec, spec = CODECS[name](), TensorSpec((1000,))
    grad = torch.empty(1000, device="meta")
    payload, state = codec.encode(codec.init(spec, SEEDS), grad, step=0, count=1)
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    assert (decoded.device.type, decoded.shape) == ("meta", (1000,))
    assert all(tensor.device.type == "meta" for tensor in payload.iter_tensors())


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
    grad = torch.full((400,), 0.3) if kind == "all equal" else normal(400)
    grad[200] *= 1000.0 if kind == "one large" else 1.0
    codec = QSGD(levels=levels, bucket_size=bucket_size, norm=norm)  # type: ignore[arg-type]
    errors = torch.stack([there_and_back(codec, grad, step=k)[0] - grad for k in range(100)]).double()
    mean, spread = errors.square().sum(dim=1).mean(), errors.square().sum(dim=1).std()
    most = bound(bucket_size, levels, norm) * grad.double().square().sum()
    assert mean <= most + 5 * spread / math.sqrt(100) + 1e-9


@pytest.mark.parametrize("codec", [QSGD(), QSGD(levels=7)])
def test_four_bits_are_the_default_and_hold_seven_levels(codec: QSGD) -> None:
    (decoded, payload), (wanted, other) = (
        there_and_back(each, normal(800)) for each in (codec, QSGD(bits=4))
    )
    assert same_bits(decoded, wanted)
    assert payload.nbytes == other.nbytes


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        *((QSGD(bits=bits, bucket_size=800), bits) for bits in (2, 3, 4, 8)),
        *(
            (QSGD(levels=levels, bucket_size=800), bits)
            for levels, bits in [(1, 2), (3, 3), (4, 4), (7, 4), (8, 5), (127, 8)]
        ),
        (Int8(bucket_size=800), 8),
        (Int8("stochastic", bucket_size=800), 8),
        (Sign(bucket_size=800), 1),
    ],
    ids=repr,
)
def test_numbers_take_the_bits_they_need_and_small_ones_have_scales_of_their_own(
    codec: Codec, bits: int
) -> None:
    decoded, payload = there_and_back(codec, torch.cat((normal(4000), 1e-4 * normal(4000))))
    assert payload.nbytes == 1000 * bits + 10 * 4
    assert 0 < decoded[4000:].abs().max() < 1e-3


def test_the_largest_number_is_never_rounded_beyond_itself() -> None:
    """127 + u is 128 in float32 for a few draws in a million."""
    grad = torch.ones(2_000_000)
    assert torch.equal(there_and_back(Int8("stochastic"), grad)[0], grad)


# --- entries ----------------------------------------------------------------------------------------------------


def test_topk_sends_exactly_the_largest() -> None:
    grad = normal(1000)
    decoded, payload = there_and_back(TopK(0.05), grad)
    values, indices = payload.iter_tensors()
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
    return TensorSpec(
        (100,), spans=(ParameterSpan((5, 8), 0), ParameterSpan((10,), 40), ParameterSpan((2, 25), 50))
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_follows_its_equations(nesterov: bool) -> None:
    codec, spec = DGC(density=0.05, momentum=0.9, nesterov=nesterov, warmup_steps=0), matrices()
    state = codec.init(spec, SEEDS)
    u, v = torch.zeros(100), torch.zeros(100)
    for step in range(30):
        grad = normal(100, step)
        payload, state = codec.encode(state, grad, step=step, count=1)
        u = 0.9 * (u + grad) if nesterov else 0.9 * u + grad
        v = v + u + grad if nesterov else v + u
        mask = torch.zeros(100, dtype=torch.bool)
        for start, stop in ((0, 40), (50, 100)):
            mask[start + v[start:stop].abs().topk(2).indices] = True
        u = torch.where(mask, 0.0, u)
        mask[40:50] = True
        torch.testing.assert_close(
            codec.decode(state, payload, spec, step=step, count=1), torch.where(mask, v, 0.0)
        )
        v = torch.where(mask, 0.0, v)
        torch.testing.assert_close(state.local["velocity"], u)
        torch.testing.assert_close(state.local["accumulated"], v)
        assert payload.nbytes == 4 * 8 + 10 * 4


def test_dgc_warms_up() -> None:
    codec = DGC(density=0.001, warmup_steps=50)
    densities = [round(codec.compute_density(step), 4) for step in (0, 9, 10, 20, 30, 40, 49, 50, 10**6)]
    assert densities == [0.3162, 0.3162, 0.1, 0.0316, 0.01, 0.0032, 0.0032, 0.001, 0.001]


# --- made of others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "scale_nbytes", "share"),
    [(chain(TopK(0.05), Int8()), 4, 254 - 1e-2), (chain(TopK(0.05), QSGD(bits=8), Truncate16()), 2, 50)],
)
def test_a_chain_encodes_values_and_leaves_indices(codec: Codec, scale_nbytes: int, share: float) -> None:
    grad = normal(1000)
    chained, payload = there_and_back(codec, grad)
    alone, _ = there_and_back(TopK(0.05), grad)
    assert payload.nbytes == 50 * (1 + 4) + scale_nbytes
    assert (chained - alone).abs().max() <= grad.abs().max() / share
    assert not chained[alone == 0].any()
    assert not codec.is_unbiased, "of three codecs one is not"


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_residual_is_what_was_not_sent_and_is_sent_once(decay: float) -> None:
    """Below a decay of 1 it is a momentum of that; a step that is not compressed leaves none."""
    codec, spec = error_feedback(TopK(0.1), decay), TensorSpec((50,))
    state, residual = codec.init(spec, SEEDS), torch.zeros(50)
    for step in range(9):
        wanted = normal(50, step) + decay * residual
        if step % 3 == 2:
            sent, state = codec.flush(state, normal(50, step))
            torch.testing.assert_close(sent, wanted)
        else:
            payload, state = codec.encode(state, normal(50, step), step=step, count=1)
            sent = codec.decode(state, payload, spec, step=step, count=1)
        residual = wanted - sent
        torch.testing.assert_close(state.local["residual"], residual)


@pytest.mark.parametrize("inner", [Identity(), by_role(), by_size()])
def test_a_codec_that_leaves_nothing_out_leaves_no_residual(inner: Codec) -> None:
    """Their payloads are views of what is encoded, which the residual must not be written over."""
    codec, spec = error_feedback(inner), TensorSpec((50,))
    payload, state = codec.encode(codec.init(spec, SEEDS), normal(50), step=0, count=1)
    assert not state.local["residual"].any()
    assert torch.equal(codec.decode(state, payload, spec, step=0, count=1), normal(50))


def test_roles_are_told_by_dimensions() -> None:
    shapes = {0: (2, 3, 1), 6: (4,), 10: (5, 2), 20: (), 21: (3, 1, 1, 3)}
    spec = TensorSpec((30,), spans=tuple(ParameterSpan(shape, start) for start, shape in shapes.items()))
    codec = by_role(TopK(0.1), Sign())
    routes = {route.name: list(map(list, route.runs)) for route in codec.list_routes(codec.init(spec, SEEDS))}
    assert routes == {"convolution": [[0, 6], [21, 9]], "other": [[10, 10]], "dense": [[6, 4], [20, 1]]}
    plain = by_role(TopK(0.1))  # matrices are sent as they are, so with the vectors
    routes = {route.name: list(map(list, route.runs)) for route in plain.list_routes(plain.init(spec, SEEDS))}
    assert routes == {"convolution": [[0, 6], [21, 9]], "dense": [[6, 15]]}
    grad = normal(30)
    payload, state = codec.encode(codec.init(spec, SEEDS), grad, step=0, count=1)
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    assert torch.equal(decoded[[6, 7, 8, 9, 20]], grad[[6, 7, 8, 9, 20]])
    assert torch.equal(decoded[10:20], there_and_back(Sign(), grad[10:20])[0])
    assert decoded[[*range(6), *range(21, 30)]].count_nonzero() == 2


def test_parts_of_a_bucket_keep_their_shapes_inside_and_the_order_of_a_state_does_not_matter() -> None:
    """DGC inside by_role still has a threshold for each weight; a checkpoint may give a state back in another order."""
    parts = (ParameterSpan((2, 5, 1), 0), ParameterSpan((10,), 10), ParameterSpan((1, 10, 1), 20))
    codec = by_role(DGC(density=0.1, warmup_steps=0))
    state = codec.init(TensorSpec((30,), spans=parts), SEEDS)
    conv, _ = codec.list_routes(state)
    assert conv.state.shared == {"sparse": [[0, 10], [10, 10]], "dense": []}
    runs = dict(reversed(state.shared["runs"].items()))
    turned = CodecState({**state.shared, "runs": runs}, state.local)
    payloads = [codec.encode(kept, normal(30), step=0, count=1)[0] for kept in (state, turned)]
    assert same_payload(*payloads)


@pytest.mark.parametrize(("numel", "nbytes"), [(99, 396), (100, 104)])
def test_size_decides(numel: int, nbytes: int) -> None:
    assert there_and_back(by_size(Identity(), Int8(), 100), normal(numel))[1].nbytes == nbytes


def test_the_generator_is_seeded_by_its_labels() -> None:
    draws = [
        torch.rand(
            3, generator=stochastic_module.create_device_generator(torch.device("cpu"), 1, label)
        ).tolist()
        for label in (1, 2, 1)
    ]
    assert draws[0] == draws[2] != draws[1]


# --- chunks -------------------------------------------------------------------------------------------------------


def test_each_chunk_sends_its_own_largest() -> None:
    grad = torch.tensor([9.0, -8.0, 7.0, 6.0, 0.1, 0.5, -0.25, 0.2, 5.0, 0.0])
    decoded, _ = there_and_back(ChunkedTopK(0.5, chunk=4, bits=None), grad)
    assert decoded.tolist() == [9.0, -8.0, 0.0, 0.0, 0.0, 0.5, -0.25, 0.0, 5.0, 0.0]


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_the_padding_of_the_last_chunk_counts_to_no_mean(bits: int) -> None:
    grad = torch.cat([normal(64), torch.tensor([2.0])])
    codec = ChunkedTopK(density=0.25, chunk=64, bits=bits)
    decoded, _ = there_and_back(codec, grad)
    sent = decoded != 0
    magnitudes = grad[sent].abs()
    low, high = magnitudes.min(), magnitudes.max()
    classes = 1 << (bits - 1)
    numbers = ((magnitudes - low) / (high - low) * classes).floor().clamp_max(classes - 1) * grad[sent].sign()
    numbers += grad[sent].sign()  # apart from 0 for both signs
    for number in numbers.unique():
        members = numbers == number
        torch.testing.assert_close(
            decoded[sent][members], grad[sent][members].mean().expand(int(members.sum()))
        )


def test_two_bits_are_a_sign_and_one_of_two_means() -> None:
    grad = torch.zeros(4096)
    grad[torch.arange(0, 4096, 64)] = torch.tensor([1.0, 5.0, 6.0, 10.0, -1.0, -5.0, -8.0, -9.0]).repeat(8)
    decoded, payload = there_and_back(ChunkedTopK(), grad)
    assert decoded[::64][:8].tolist() == [3.0, 3.0, 8.0, 8.0, -3.0, -3.0, -8.5, -8.5]
    assert int(decoded.count_nonzero()) == 64
    assert payload.nbytes == 64 + 32 + 16 + 4 * 4  # twelve bits of index, two of code, four means


@pytest.mark.parametrize(
    ("chunk", "index_nbytes"),
    [(2, 3), (3, 6), (256, 85), (257, 85 + 11), (4096, 1394 + 700), (1 << 16, 2 * 22287)],
)
def test_indices_take_the_bits_of_their_chunk(chunk: int, index_nbytes: int) -> None:
    keep, numel = max(1, round(0.02 * chunk)), 16 * chunk + 1
    grad = normal(numel, chunk)
    decoded, payload = there_and_back(ChunkedTopK(0.02, chunk=chunk, bits=None), grad)
    rows = torch.nn.functional.pad(grad, (0, 17 * chunk - numel)).view(17, chunk)
    wanted = torch.zeros_like(rows).scatter_(1, rows.abs().topk(keep).indices, 1.0).view(-1)[:numel] * grad
    assert torch.equal(decoded, wanted)
    assert payload.nbytes == 17 * keep * 4 + index_nbytes


# --- components ---------------------------------------------------------------------------------------------------


def waves(size: int) -> Tensor:
    """The orthonormal cosine transform by its definition, a component in each row."""
    numbers = torch.arange(size)
    rows = torch.cos(math.pi * torch.outer(numbers, 2 * numbers + 1) / (2 * size)) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows


def test_one_component_of_a_block_is_sent_whole_and_alone() -> None:
    codec = DeMo(0.9, chunk=8, keep=1)
    matrix = torch.outer(waves(8)[3], waves(6)[2]).repeat(2, 2) * torch.tensor(
        [[1.0], [-2.0]]
    ).repeat_interleave(8, 0)
    spec = TensorSpec((192,), spans=(ParameterSpan((16, 12), 0),))
    payload, state = codec.encode(codec.init(spec, SEEDS), matrix.reshape(-1), step=0, count=1)
    values, low, _ = payload.iter_tensors()
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, -2.0, -2.0]))
    assert low.numel() == 6  # four indices of six bits, in a group of eight
    decoded = codec.decode(state, payload, spec, step=0, count=1)
    torch.testing.assert_close(decoded.view(16, 12), matrix)
    assert float(state.local["components"].abs().max()) < 1e-6


def test_what_is_sent_leaves_the_momentum_and_the_rest_goes_on() -> None:
    codec = DeMo(0.8, chunk=4, keep=3)
    spec = TensorSpec((60,), spans=(ParameterSpan((4, 2, 4), 0), ParameterSpan((28,), 32)))
    state, momentum = codec.init(spec, SEEDS), torch.zeros(60)
    assert state.shared["blocks"] == [[0, 4, 8, 4, 4], [32, 1, 28, 1, 4]]
    for step in range(6):
        grad = torch.randn(60, generator=create_generator(5, step))
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
        torch.testing.assert_close(codec.invert(state, state.local["components"]), momentum)
