// transpose_blocks: rows (one head's elements of one token) from [items, outer, inner] to the same
// indices under other strides. Outer and inner are tokens and heads, in the order of the target.

struct TransposeParams {
    i64 source;
    i64 source_item, source_outer, source_inner;  // strides
    i64 target;
    i64 target_item, target_outer, target_inner;  // strides
    Span span;
    Divisor inner;
    Divisor outer;
};

struct TransposedRows {
    const TransposeParams& p;

    __device__ __forceinline__ Place place(u32 row, i64 offset) const {
        const Split at = split(row, p.inner);
        const Split of = split(at.quotient, p.outer);
        const i64 item = of.quotient, outer = of.remainder, inner = at.remainder;
        Place found;
        found.source = p.source + item * p.source_item + outer * p.source_outer +
                       inner * p.source_inner + offset;
        found.target = p.target + item * p.target_item + outer * p.target_outer +
                       inner * p.target_inner + offset;
        return found;
    }
};

KERNEL transpose(const __grid_constant__ TransposeParams p) {
    const TransposedRows rows = {p};
    copy_rows(rows, p.span);
}
