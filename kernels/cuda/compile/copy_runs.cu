// gather_blocks, scatter_blocks, copy_blocks: every run of bytes of every pair of blocks.

constexpr int INLINE_PAIRS = 128;

// One of the runs that a pair of blocks consists of, in device memory.
enum RunColumn { SOURCE_OFFSET, TARGET_OFFSET, SKIPPED, RUN_COLUMNS };

// Where prefixes are copied: byte `offset` of run r of pair i, if offset < prefix[i] - skipped[r]:
// the first tokens of the prefix may be in runs before.
struct CopyRunsParams {
    i64 source;  // run r of pair i: source + source_offset[r] + source_id[i] * source_stride
    i64 source_stride;
    i64 target;
    i64 target_stride;
    i64 runs;  // [runs per pair, RUN_COLUMNS] int64
    i64 pairs;
    Span span;  // rows: the runs of one pair after the other
    Divisor runs_per_pair;
};

// Few pairs come by value: no memory has to be filled before the launch, nor kept after it.
struct InlinePairs {
    CopyRunsParams copy;
    i64 source_ids[INLINE_PAIRS];
    i64 target_ids[INLINE_PAIRS];
    i64 prefixes[INLINE_PAIRS];

    __device__ __forceinline__ i64 source_id(i64 pair) const { return source_ids[pair]; }
    __device__ __forceinline__ i64 target_id(i64 pair) const { return target_ids[pair]; }
    __device__ __forceinline__ i64 prefix(i64 pair) const { return prefixes[pair]; }
    __device__ __forceinline__ bool is_pair(i64, i64) const { return true; }  // checked
};

struct PairsInMemory {
    CopyRunsParams copy;
    Ids source_ids;
    Ids target_ids;
    i64 prefixes;  // address of int64 [pairs]
    i64 errors;

    __device__ __forceinline__ i64 source_id(i64 pair) const { return load_id(source_ids, pair); }
    __device__ __forceinline__ i64 target_id(i64 pair) const { return load_id(target_ids, pair); }
    __device__ __forceinline__ i64 prefix(i64 pair) const { return load_word(prefixes, pair); }
    __device__ __forceinline__ bool is_pair(i64 source, i64 target) const {
        return is_valid(source, source_ids) & is_valid(target, target_ids);
    }
};

template <class Pairs, bool PREFIXES>
struct RunsOfPairs {
    const Pairs& pairs;

    __device__ __forceinline__ Place place(u32 row, i64 offset) const {
        const CopyRunsParams& p = pairs.copy;
        const Split at = split(row, p.runs_per_pair);
        const i64 run = p.runs + at.remainder * (RUN_COLUMNS * (i64)sizeof(i64));
        i64 source_id = pairs.source_id(at.quotient), target_id = pairs.target_id(at.quotient);
        bool wanted = pairs.is_pair(source_id, target_id);
        source_id = wanted ? source_id : 0;  // products of what is no id may overflow
        target_id = wanted ? target_id : 0;
        if (PREFIXES) {
            wanted = wanted & (offset < pairs.prefix(at.quotient) - load_word(run, SKIPPED));
        }
        Place found;
        found.source =
            p.source + load_word(run, SOURCE_OFFSET) + source_id * p.source_stride + offset;
        found.target =
            p.target + load_word(run, TARGET_OFFSET) + target_id * p.target_stride + offset;
        found.target = wanted ? found.target : 0;
        return found;
    }
};

template <bool PREFIXES, class Pairs>
__device__ __forceinline__ void copy_pairs(const Pairs& pairs) {
    const RunsOfPairs<Pairs, PREFIXES> rows = {pairs};
    copy_rows(rows, pairs.copy.span);
}

__device__ __forceinline__ void count_bad_pairs(const PairsInMemory& p) {
    count_bad_ids(p.source_ids, p.copy.pairs, p.errors);
    count_bad_ids(p.target_ids, p.copy.pairs, p.errors);
}

KERNEL copy_inline(const __grid_constant__ InlinePairs p) { copy_pairs<false>(p); }

KERNEL copy_inline_prefixes(const __grid_constant__ InlinePairs p) { copy_pairs<true>(p); }

KERNEL copy_listed(const __grid_constant__ PairsInMemory p) {
    count_bad_pairs(p);
    copy_pairs<false>(p);
}

KERNEL copy_listed_prefixes(const __grid_constant__ PairsInMemory p) {
    count_bad_pairs(p);
    copy_pairs<true>(p);
}
