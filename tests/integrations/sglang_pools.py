"""Host pools as SGLang 0.5.23 describes them, and what both they and the real ones must do.

A stand-in written from the interface: the shapes of ``kv_buffer`` in each layout, and pointers and
sizes of a page.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import torch

PAGE = 4
PAGES = 12
LAYERS, HEADS, DIM, LATENT = 3, 2, 8, 24
SLOTS, STATE_LAYERS = 6, 5

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class StandInPool:
    """Keys and values in the host's memory, or latents."""

    def __init__(self, layout, *, is_mla=False, dtype=torch.float32, heads=HEADS):
        self.layout, self.dtype = layout, dtype
        self.page_size, self.page_num = PAGE, PAGES
        self.size = self.free = PAGE * PAGES
        self.layer_num = self.target_layer_num = LAYERS
        self.start_layer, self.end_layer = 0, LAYERS
        self.head_num, self.head_dim, self.v_head_dim = heads, DIM, DIM
        self.kv_cache_dim = LATENT
        self.is_mla = is_mla
        row = (1, LATENT) if is_mla else (heads, DIM)
        shape = {
            "layer_first": (LAYERS, self.size, *row),
            "page_first": (self.size, LAYERS, *row),
            "page_first_direct": (PAGES, LAYERS, PAGE, *row),
            "page_head": (PAGES, row[0], PAGE, LAYERS, row[1]),
        }[layout]
        self.kv_buffer = torch.zeros(shape if is_mla else (2, *shape), dtype=dtype)

    def available_size(self):
        return self.free

    @property
    def k_buffer(self):
        return self.kv_buffer[0]

    @property
    def v_buffer(self):
        return self.kv_buffer[1]

    def get_page_buffer_meta(self, indices):
        parts = [self.kv_buffer] if self.is_mla else [self.kv_buffer[0], self.kv_buffer[1]]
        pointers, sizes = [], []
        for index in indices.tolist()[:: self.page_size]:
            for layer in range(LAYERS if self.layout == "layer_first" else 1):
                for part in parts:
                    block = part.numel() // self.size * self.page_size
                    if self.layout == "layer_first":
                        block //= LAYERS
                        at = layer * part[0].numel() + index * part[0, 0].numel()
                    else:
                        at = index // self.page_size * block
                    pointers.append(part.data_ptr() + at * part.element_size())
                    sizes.append(block * part.element_size())
        return pointers, sizes


class StandInStates:
    """A ``MambaPoolHost``: slots of recurrent states, with a buffer for each of their tensors."""

    def __init__(self, *, slots=SLOTS, shape=(2, 8, 8), dtype=torch.float32, conv=((24, 3),)):
        self.layout, self.page_size, self.page_num = "page_first", 1, slots
        self.num_mamba_layers = STATE_LAYERS
        self.mtp_draft_buffer_infos, self.slot_state_buffers = (), []
        self.temporal_buffer = torch.zeros((slots, STATE_LAYERS, 1, *shape), dtype=dtype)
        self.conv_buffer = [
            torch.zeros((slots, STATE_LAYERS, 1, *one), dtype=torch.bfloat16) for one in conv
        ]

    def get_page_buffer_meta(self, indices):
        found = [
            (buffer[slot].data_ptr(), buffer[slot].nbytes)
            for slot in indices.tolist()
            for buffer in (self.temporal_buffer, *self.conv_buffer)
            if buffer.numel()
        ]
        return [at for at, _ in found], [size for _, size in found]


def fill_states(pool, seed=0):
    """Random content in all slots."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in (pool.temporal_buffer, *pool.conv_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=generator).to(buffer.dtype))


def state_content(pool, slot):
    """A copy of all bytes that SGLang would move for a state."""
    buffers = (pool.temporal_buffer, *pool.conv_buffer)
    return torch.cat([one[slot].contiguous().view(torch.uint8).flatten() for one in buffers])


def transfer(keys, slots=None, *, name="mamba", hit_policy="trailing_pages", make=SimpleNamespace):
    """SGLang's ``PoolTransfer`` of states: for a lookup without slots."""
    slots = None if slots is None else torch.tensor(slots)
    return make(name=name, keys=keys, host_indices=slots, hit_policy=hit_policy)


def state_round_trip(open_storage, source, target, **made):
    """Pages and the states at two ends are saved, and come into other places, byte for byte.

    Args:
        open_storage: returns a storage with a pool of pages, filled by a seed, and this of states.
        source: the pool of the states that are saved.
        target: the pool that they come into.
        made: how transfers are made.
    """
    names = hashes(7)
    fill_states(source, 1)
    fill_states(target, 2)
    storage, pool = open_storage(source, 3)
    ask = [transfer(["__placeholder__"], **made)]
    assert storage.batch_exists_v2(names, ask).kv_hit_pages == 0
    saved = {end: state_content(source, slot) for end, slot in ((2, 0), (4, 3))}
    pages = [page_content(pool, page) for page in range(5)]
    assert storage.batch_set_v2([transfer([names[1]], [0], **made)]) == {"mamba": [True]}
    prefix = SimpleNamespace(prefix_keys=names[:3])
    assert storage.batch_set_v2([transfer([names[3]], [3], **made)], prefix) == {"mamba": [True]}
    fill_states(source, 4)  # others' from now on
    assert storage.batch_set_v1(names[:5], indices(range(5))) == [True] * 5
    storage.close()

    storage, pool = open_storage(target, 5)
    found = storage.batch_exists_v2(names, ask)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {"kv": 5, "mamba": 4}
    assert storage.batch_exists_v2(names[:3], ask).kv_hit_pages == 2
    assert storage.batch_exists_v2(names[:1], ask).kv_hit_pages == 0
    before = {slot: state_content(target, slot) for slot in range(SLOTS)}
    assert storage.batch_get_v1(names[:4], indices(range(6, 10))) == [True] * 4
    for end, slot in ((2, 1), (4, 4)):
        got = storage.batch_get_v2([transfer([names[end - 1]], [slot], **made)])
        assert got == {"mamba": [True]}
        assert torch.equal(state_content(target, slot), saved[end])
    assert storage.batch_get_v2([transfer([names[2]], [2], **made)]) == {"mamba": [False]}
    for slot in (0, 2, 3):
        assert torch.equal(state_content(target, slot), before[slot])
    for page, content in enumerate(pages[:4], 6):
        assert torch.equal(page_content(pool, page), content)
    storage.close()


def save(storage, count=3):
    """Whether as many pages were saved."""
    done = storage.batch_set_v1(hashes(count), indices(range(count)))
    assert storage._access.flush(60)
    return all(done)


def works(storage, count=3):
    """True if `save` d pages are found and loaded; False: neither found, loaded nor saved."""
    where = indices(range(count, 2 * count))
    outcomes = {
        storage.batch_exists(hashes(count)) == count,
        *storage.batch_get_v1(hashes(count), where),
        *storage.batch_set_v1(hashes(count, "more"), where),
    }
    assert len(outcomes) == 1
    return outcomes.pop()


def damage(directory, at=300):
    """Overwrites 64 bytes at this place of each segment of a disk store."""
    for file in directory.rglob("*"):
        if file.is_file() and file.stat().st_size >= 1 << 20:
            with file.open("r+b") as segment:
                segment.seek(at)
                segment.write(b"\xff" * 64)


def page_content(pool, page):
    """A copy of all that SGLang would move for a page, in an order that no layout changes."""
    planes = [pool.kv_buffer] if pool.is_mla else [pool.k_buffer, pool.v_buffer]
    start, size = page * PAGE, PAGE
    found = []
    for plane in planes:
        if pool.layout == "layer_first":
            part = plane[:, start : start + size]
        elif pool.layout == "page_first":
            part = plane[start : start + size].transpose(0, 1)
        elif pool.layout == "page_first_direct":
            part = plane[page]
        else:
            part = plane[page].permute(2, 1, 0, 3)
        found.append(part.contiguous().flatten())
    return torch.cat(found).clone()


def fill(pool, seed=0):
    """Random content in all pages."""
    generator = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator).to(pool.dtype))


def hashes(count, seed="a"):
    """A chain of page hashes."""
    found, last = [], seed
    for number in range(count):
        last = hashlib.sha256(f"{last}{number}".encode()).hexdigest()
        found.append(last)
    return found


def indices(pages):
    """Of all tokens of these pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def storage_config(model, url, *, is_mla=False, make=SimpleNamespace, **more):
    """SGLang's settings of a storage backend."""
    extra = {
        "backend_name": "kvconnect",
        "module_path": "kvconnect.integrations.sglang",
        "class_name": "KvConnectStorage",
        "interface_v1": 1,
        "url": url,
        "lookup_timeout_ms": 60_000,
        "staging_bytes": 1 << 20,
        "load_decisions": False,
    }
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    ranks |= {name: more.pop(name) for name in list(more) if name in ranks}
    return make(
        **ranks,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=str(model),
        extra_config=extra | more,
    )


def round_trip(storage, source, target, *, make_storage):
    """Pages of `source` are saved, and come into other places of `target`, byte for byte."""
    fill(source, 1)
    fill(target, 2)
    names, pages = hashes(6), [3, 0, 7, 9, 1, 4]
    storage.register_mem_pool_host(source)
    prefix = SimpleNamespace(prefix_keys=names[:4])
    assert storage.batch_exists(names) == 0
    assert storage.batch_set_v1(names[:4], indices(pages[:4])) == [True] * 4
    assert storage.batch_set_v1(names[4:], indices(pages[4:]), prefix) == [True] * 2
    saved = [page_content(source, page) for page in pages]
    fill(source, 3)  # others' from now on
    storage.close()
    storage = make_storage()
    storage.register_mem_pool_host(target)
    assert storage.batch_exists(names) == 6
    assert storage.batch_exists([*names[:3], *hashes(2, "b"), *names[3:]]) == 3
    elsewhere = [11, 5, 6, 2, 8, 10]
    before = {page: page_content(target, page) for page in range(PAGES)}
    asked = [*names, *hashes(1, "b")]
    assert storage.batch_get_v1(asked, indices([*elsewhere, 0])) == [True] * 6 + [False]
    for page, content in zip(elsewhere, saved, strict=True):
        assert torch.equal(page_content(target, page), content)
    for page in (1, 3, 4, 7, 9):
        assert torch.equal(page_content(target, page), before[page])
    storage.close()
