// kv_cache_update: cache[b, n, write_indices[b] + s] = update[b, n, s], in rows: one head's
// elements of one token. A sequence that does not fit is not written at all, and counted.

struct UpdateParams {
    i64 cache;
    i64 cache_batch, cache_head, cache_token;  // strides
    i64 update;
    i64 update_batch, update_head, update_token;  // strides; update_batch only if padded
    Ids write_indices;                            // limit: S_max
    Ids lengths;                                  // packed: cumulative token counts [batch + 1]
    i64 batch;
    i64 tokens;  // padded: S_new of each sequence; packed: of all sequences
    i64 search;  // packed: the largest power of two below batch, or 0
    i64 errors;
    Span span;
    Divisor inner;  // padded: S_new; packed: heads
    Divisor heads;  // padded
};

// Where a sequence's tokens come from, and go to.
struct Sequence {
    i64 begin, end;  // packed: its tokens in the update
    i64 start;       // position in the cache
    bool fits;
};

__device__ __forceinline__ Sequence padded_sequence(const UpdateParams& p, i64 number) {
    Sequence found;
    found.begin = 0;
    found.end = p.tokens;
    found.start = load_id(p.write_indices, number);
    found.fits = (found.start >= 0) & (found.start <= p.write_indices.limit - p.tokens);
    found.start = found.fits ? found.start : 0;
    return found;
}

__device__ __forceinline__ Sequence packed_sequence(const UpdateParams& p, i64 number) {
    Sequence found;
    const i64 begin = load_id(p.lengths, number), end = load_id(p.lengths, number + 1);
    const i64 start = load_id(p.write_indices, number);
    const bool is_part = (begin >= 0) & (begin <= end) & (end <= p.tokens);
    const i64 length = is_part ? end - begin : 0;
    found.fits = is_part & (start >= 0) & (start <= p.write_indices.limit - length);
    found.begin = found.fits ? begin : 0;
    found.end = found.fits ? end : 0;
    found.start = found.fits ? start : 0;
    return found;
}

struct PaddedRows {
    const UpdateParams& p;

    __device__ __forceinline__ Place place(u32 row, i64 offset) const {
        const Split at = split(row, p.inner);
        const Split of = split(at.quotient, p.heads);
        const i64 token = at.remainder, head = of.remainder, number = of.quotient;
        const Sequence sequence = padded_sequence(p, number);
        Place found;
        found.source = p.update + number * p.update_batch + head * p.update_head +
                       token * p.update_token + offset;
        found.target = p.cache + number * p.cache_batch + head * p.cache_head +
                       (sequence.start + token) * p.cache_token + offset;
        found.target = sequence.fits ? found.target : 0;
        return found;
    }
};

struct PackedRows {
    const UpdateParams& p;

    // The last sequence that begins at or before `token`, or the first one.
    __device__ __forceinline__ i64 sequence_of(i64 token) const {
        i64 found = 0;
        for (i64 step = p.search; step > 0; step >>= 1) {
            const i64 next = found + step;
            if (next < p.batch && load_id(p.lengths, next) <= token) found = next;
        }
        return found;
    }

    __device__ __forceinline__ Place place(u32 row, i64 offset) const {
        const Split at = split(row, p.inner);
        const i64 token = at.quotient, head = at.remainder, number = sequence_of(token);
        const Sequence sequence = packed_sequence(p, number);
        // Lengths on the device are not checked; they may leave tokens without a sequence.
        const bool wanted = (sequence.begin <= token) & (token < sequence.end);
        Place found;
        found.source = p.update + token * p.update_token + head * p.update_head + offset;
        found.target = p.cache + number * p.cache_batch + head * p.cache_head +
                       (sequence.start + token - sequence.begin) * p.cache_token + offset;
        found.target = wanted ? found.target : 0;
        return found;
    }
};

KERNEL update_padded(const __grid_constant__ UpdateParams p) {
    const i64 step = (i64)gridDim.x * THREADS;
    for (i64 i = (i64)blockIdx.x * THREADS + (i64)threadIdx.x; i < p.batch; i += step) {
        count_error(p.errors, !padded_sequence(p, i).fits);
    }
    const PaddedRows rows = {p};
    copy_rows(rows, p.span);
}

KERNEL update_packed(const __grid_constant__ UpdateParams p) {
    const i64 step = (i64)gridDim.x * THREADS;
    for (i64 i = (i64)blockIdx.x * THREADS + (i64)threadIdx.x; i < p.batch; i += step) {
        count_error(p.errors, !packed_sequence(p, i).fits);
    }
    const PackedRows rows = {p};
    copy_rows(rows, p.span);
}
