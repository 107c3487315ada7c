"""lightnet_attention: the call of torch's scaled_dot_product_attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.functional import silu

from ndlightnet.ops import lightnet_attention


def dense(q, k, v, keep=None):
    """Eq. 5 and 6 with a weight for each query and key; keep: (batch, 1, length, source)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    keep = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool) if keep is None else keep
    p = torch.where(keep[..., None], k[:, :, None], -torch.inf).softmax(3)  # b h l s d
    return torch.einsum("bhld,bhlsd,bhse->bhle", silu(q), p, v)


def inputs(heads=4, kv_heads=4, length=7, source=7, dim=5, value=6):
    torch.manual_seed(0)
    shapes = (heads, length, dim), (kv_heads, source, dim), (kv_heads, source, value)
    return [torch.randn(2, *s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("source", [7, 3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_full(close, kv_heads, source, masked):
    q, k, v = inputs(kv_heads=kv_heads, source=source)
    mask = torch.ones(2, 1, 1, source, dtype=torch.bool)
    mask[0, ..., 2:] = False
    mask = mask if masked else None
    y = lightnet_attention(q, k, v, mask, enable_gqa=True)
    expected = dense(q, k, v, mask)
    assert y.shape == sdpa(q, k, v, mask, enable_gqa=True).shape
    close(y, expected, 1e-12)
    pairs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (y, expected))
    for ours, theirs in zip(*pairs, strict=True):
        close(ours, theirs, 1e-10)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_causal(close, kv_heads, masked):
    q, k, v = inputs(kv_heads=kv_heads)
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    mask[..., 5:] = False
    keep = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    y = lightnet_attention(q, k, v, mask if masked else None, is_causal=True, enable_gqa=kv_heads < 4)
    close(y, dense(q, k, v, keep & mask if masked else keep), 1e-12)


def test_keys_of_grouped_heads_are_not_copied(monkeypatch):
    """The memory is made of the keys as they are."""
    from ndlightnet.ops.lightnet import sdpa as module

    seen, summarize = [], module.summarize
    monkeypatch.setattr(module, "summarize", lambda k, v, **how: (seen.append(k), summarize(k, v, **how))[1])
    q, k, v = inputs(kv_heads=2)
    lightnet_attention(q, k, v, enable_gqa=True)
    assert seen[0].data_ptr() == k.data_ptr() and seen[0].shape == (2, 7, 2, 5)


def test_what_has_no_meaning_is_refused_by_name():
    q, k, v = (x.detach() for x in inputs())
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    for mask in (
        causal,
        causal[None, None],
        causal[:2, :],
        torch.zeros(2, 1, 1, 7),
        torch.ones(2, 1, 1, 6, dtype=torch.bool),
        torch.ones(2, 4, 1, 7) > 0,
    ):
        with pytest.raises(ValueError, match=r"attn_mask \(.*expected bool \(2, 1, 1, 7\)"):
            lightnet_attention(q, k, v, mask)
    for wrong in ({"scale": 0.5}, {"dropout_p": 0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            lightnet_attention(q, k, v, **wrong)
    with pytest.raises(ValueError, match="query has 4 heads, key 2"):
        lightnet_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="query has 4 heads, key 3"):
        lightnet_attention(q, k[:, :3], v[:, :3], enable_gqa=True)
    with pytest.raises(ValueError, match="is_causal=True, 7 queries and 6 keys"):
        lightnet_attention(q, k[:, :, :6], v[:, :, :6], is_causal=True)


ANY = torch.zeros(2, 4, 7, 5)
WRONG = [
    ({"query": ANY[0]}, ValueError, r"query \(4, 7, 5\): expected \(batch, heads, length, dim\)"),
    ({"key": ANY[..., :4]}, ValueError, r"key \(2, 4, 7, 4\): expected \(2, heads, source, 5\)"),
    ({"key": ANY[:1]}, ValueError, r"key \(1, 4, 7, 5\): expected \(2, heads, source, 5\)"),
    ({"value": ANY[:, :, :6]}, ValueError, r"value \(2, 4, 6, 5\): expected \(2, 4, 7, value_dim"),
    ({"value": ANY[:, :2]}, ValueError, r"value \(2, 2, 7, 5\): expected \(2, 4, 7, value_dim\)"),
    ({"value": ANY[:1]}, ValueError, r"value \(1, 4, 7, 5\): expected \(2, 4, 7, value_dim\)"),
    ({"query": ANY.long()}, ValueError, r"query \(2, 4, 7, 5\) torch.int64: expected floats"),
    ({"key": ANY.bool()}, ValueError, r"key \(2, 4, 7, 5\) torch.bool: expected floats"),
    ({"value": [1.0]}, TypeError, r"value of type list: expected a torch.Tensor"),
    ({"key": ANY.double()}, ValueError, "torch.float64, torch.float32: expected torch.float64 of"),
    ({"value": ANY.double()}, ValueError, "torch.float32, torch.float64: expected torch.float64"),
    ({"attn_mask": [True]}, TypeError, "attn_mask of type list: expected a torch.Tensor"),
    (
        {"attn_mask": torch.ones(2, 1, 1, 7).long()},
        ValueError,
        r"attn_mask \(2, 1, 1, 7\) torch.int64: expected bool \(2, 1, 1, 7\), True = data$",
    ),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_argument_that_does_not_fit_is_named(wrong, kind, message, is_causal):
    with pytest.raises(kind, match=message):
        lightnet_attention(**{"query": ANY, "key": ANY, "value": ANY, **wrong}, is_causal=is_causal)
