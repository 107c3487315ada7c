"""What the tests of axis-causal attention share: samples, what a frame sees, angles, chunks."""

import itertools

import torch

from ndlightnet.ops import Position, axis_causal_attention

HEADS = (0.1, 0.7)  # another forgetting in every head


def sample(shape, dim=5, value_dim=3, heads=2, batch=2, dtype=torch.float64, grads=True):
    """q, k, v and the angles of a grid; keys are wide, so that the decay matters."""
    length = torch.Size(shape).numel()
    q, k = (torch.randn(batch, length, heads, dim, dtype=dtype) for _ in "qk")
    v = torch.randn(batch, length, heads, value_dim, dtype=dtype)
    theta = 3 * torch.rand(heads, dim, dtype=dtype)
    return [x.requires_grad_(grads) for x in (q, 2 * k, v, theta)]


def padding(shape, batch=2):
    """Holes in the first sample, a whole frame of them among others."""
    mask = torch.rand(batch, *shape) < 0.6
    mask[0, shape[0] // 2], mask[1:] = False, True
    return mask.flatten(1)


def per_head(forget, dtype=torch.float64):
    return torch.tensor(forget, dtype=dtype) if isinstance(forget, tuple) else forget


def weights(shape, window=None, forget=0.0):
    """How much of exp(k) counts: (target, source, heads)."""
    frame = torch.arange(torch.Size(shape).numel()) * shape[0] // torch.Size(shape).numel()
    age = (frame[:, None] - frame).double()
    see = (age >= 0) & (age < (window or shape[0]))
    rates = torch.as_tensor(per_head(forget), dtype=torch.float64).expand(2)
    return see[..., None] * torch.exp(-age.clamp(min=0)[..., None] * rates)


def angles(shape, theta, start=None, prefix=0):
    """(prefix + length, heads, slots) by hand: consecutive groups of slots, one per axis (maths.md 6.2)."""
    place = torch.tensor(list(itertools.product(*map(range, shape))), dtype=torch.float64)
    place = place + torch.tensor(start or [0] * len(shape), dtype=torch.float64)
    groups = torch.tensor_split(theta.double(), len(shape), dim=-1)
    grid = torch.cat([place[:, a, None, None] * group for a, group in enumerate(groups)], -1)
    return torch.cat([grid.new_zeros(prefix, *grid.shape[1:]), grid])


def whole(state):
    """Sums and memories themselves, whatever the maximum is; for tests whose keys are small."""
    rows = state.memory.shape[-2] // state.sum.shape[-1]
    scale = state.max.exp()
    return scale * state.sum, torch.cat([scale] * rows, -1)[..., None] * state.memory


def attend(q, k, v, shape, *, state=None, first=None, **options):
    """All frames of a grid; or those of a `shape` from the frame `first` on."""
    if options.get("position") is not None:
        start = None if first is None else (first, *[0] * (len(shape) - 1))
        options["position"] = Position(options["position"], shape, offset=start)
    return axis_causal_attention(q, k, v, shape[0], state=state, **options)


def in_chunks(q, k, v, shape, chunks, mask=None, **options):
    """Output and State from part to part."""
    outs, state, at, tokens = [], None, 0, k.shape[1] // shape[0]
    for n in chunks:
        now = slice(at * tokens, (at + n) * tokens)
        out, state = attend(
            q[:, now],
            k[:, now],
            v[:, now],
            (n, *shape[1:]),
            first=torch.tensor(at),
            state=state,
            mask=None if mask is None else mask[:, now],
            **options,
        )
        outs.append(out)
        at += n
    assert at == shape[0]
    return torch.cat(outs, 1), state
