// reshape_and_cache: keys and values of new tokens to their slots in one layer.

struct AppendSide {
    i64 source;
    i64 source_token, source_head;  // strides
    i64 target;
    i64 target_block, target_token, target_head;  // strides
};

struct AppendParams {
    AppendSide sides[2];  // keys and values, with rows of equal length; or one of them
    Ids slots;            // limit: blocks * tokens per block
    i64 tokens;
    i64 errors;
    Span span;
    Divisor heads;
    Divisor num_sides;
    i64 block_bits;  // tokens per block are 2^block_bits; -1: no power of two, slots below 2^31
    Divisor tokens_per_block;
};

struct AppendedRows {
    const AppendParams& p;

    __device__ __forceinline__ Place place(u32 row, i64 offset) const {
        const Split at = split(row, p.heads);
        const Split of = split(at.quotient, p.num_sides);
        const i64 head = at.remainder, token = of.quotient;
        const i64 named = load_id(p.slots, token);
        const bool valid = is_valid(named, p.slots);
        const i64 slot = valid ? named : 0;
        const i64 divided = split((u32)slot, p.tokens_per_block).quotient;
        const i64 block = p.block_bits >= 0 ? slot >> (p.block_bits & 63) : divided;
        const i64 in_block = slot - block * p.tokens_per_block.divisor;
        const AppendSide& side = p.sides[of.remainder];
        Place found;
        found.source = side.source + token * side.source_token + head * side.source_head + offset;
        found.target = side.target + block * side.target_block +
                       in_block * side.target_token + head * side.target_head + offset;
        found.target = valid ? found.target : 0;
        return found;
    }
};

KERNEL append(const __grid_constant__ AppendParams p) {
    count_bad_ids(p.slots, p.tokens, p.errors);
    const AppendedRows rows = {p};
    copy_rows(rows, p.span);
}
