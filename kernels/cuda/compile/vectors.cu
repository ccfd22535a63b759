// What all kernels share; put before each of them, see sources.py. No header is included anywhere.
//
// All addresses, ids, strides and offsets are 64 bits wide. Global memory is touched by load,
// load_word, load_id, store and count_error only: the tests put checks there. VECTOR_NBYTES is defined
// by the compiler's options: the widest access that bases, strides and lengths allow.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#if VECTOR_NBYTES == 16
typedef uint4 Vector;
#elif VECTOR_NBYTES == 8
typedef uint2 Vector;
#elif VECTOR_NBYTES == 4
typedef u32 Vector;
#elif VECTOR_NBYTES == 2
typedef u16 Vector;
#elif VECTOR_NBYTES == 1
typedef u8 Vector;
#else
#error VECTOR_NBYTES must be 16, 8, 4, 2 or 1
#endif

constexpr int THREADS = 256;
constexpr int UNROLL = 4;  // independent loads of a thread before its first store
constexpr i64 TILE = THREADS * UNROLL;

// Every kernel: so many threads, and no more than 64 registers each.
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 4)

// Division by a number that the host knows, in one multiplication. multiplier =
// ceil(2^shift / divisor) with shift = 31 + ceil(log2(divisor)); right for dividends below 2^31.
struct Divisor {
    i64 divisor;
    u32 multiplier;
    u32 shift;
};

struct Split {
    u32 quotient;
    u32 remainder;
};

// `value` is below 2^31. Only numbers of rows and vectors are split: the host launches again where
// there are more. Offsets made of them are 64 bits wide.
__device__ __forceinline__ Split split(u32 value, const Divisor& by) {
    Split result;
    result.quotient = (u32)(((u64)value * by.multiplier) >> by.shift);
    result.remainder = value - result.quotient * (u32)by.divisor;
    return result;
}

template <class V>
__device__ __forceinline__ V load(i64 address) {
    return __ldcs(reinterpret_cast<const V*>(address));
}

template <class V>
__device__ __forceinline__ void store(i64 address, V value) {
    __stcs(reinterpret_cast<V*>(address), value);
}

__device__ __forceinline__ i64 load_word(i64 address, i64 index) {
    return __ldg(reinterpret_cast<const i64*>(address) + index);
}

// int32 or int64 at `address`, by `width` in bytes.
struct Ids {
    i64 address;
    i64 width;
    i64 limit;  // ids are below it
};

// Without a branch: the upper half of an int64, or the whole int32 again.
__device__ __forceinline__ i64 load_id(const Ids& ids, i64 index) {
    const i64 address = ids.address + index * ids.width;
    const int low = __ldg(reinterpret_cast<const int*>(address));
    const int high = __ldg(reinterpret_cast<const int*>(address + ids.width - 4));
    return ids.width == 8 ? (i64)(((u64)(u32)high << 32) | (u32)low) : (i64)low;
}

// Ids that are not valid are treated like -1, the padding: no memory outside is touched.
__device__ __forceinline__ bool is_valid(i64 id, const Ids& ids) {
    return (id >= 0) & (id < ids.limit);
}

// The debug error word of the device counts them; `errors` is its address, or 0.
__device__ __forceinline__ void count_error(i64 errors, bool wrong) {
    if (wrong && errors != 0) atomicAdd(reinterpret_cast<u64*>(errors), (u64)1);
}

__device__ __forceinline__ void count_bad_ids(const Ids& ids, i64 count, i64 errors) {
    const i64 step = (i64)gridDim.x * THREADS;
    for (i64 i = (i64)blockIdx.x * THREADS + (i64)threadIdx.x; i < count; i += step) {
        const i64 id = load_id(ids, i);
        count_error(errors, !is_valid(id, ids) && id != -1);
    }
}

// The addresses of one vector on both sides; with target 0 it is not copied.
struct Place {
    i64 source;
    i64 target;
};

// The rows of one launch: from `first` on, `vectors` in all, at least 1 and below 2^31.
struct Span {
    i64 first;
    i64 vectors;
    Divisor vectors_per_row;
};

// Copies them, whatever the grid is. `rows.place(row, offset)` says where byte `offset` of a row
// is, on both sides; neighbouring threads have neighbouring vectors.
template <class Rows>
__device__ __forceinline__ void copy_rows(const Rows& rows, const Span& span) {
    const u32 last = (u32)span.vectors - 1, first_row = (u32)span.first;
    for (i64 begin = (i64)blockIdx.x * TILE; begin <= last; begin += (i64)gridDim.x * TILE) {
        Place places[UNROLL];
        Vector values[UNROLL];
        // Threads beyond the end look at the last vector, and copy nothing: there is no branch
        // here, so that what all four vectors need is under way together.
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const u32 index = (u32)begin + k * THREADS + threadIdx.x;
            const Split at = split(index <= last ? index : last, span.vectors_per_row);
            places[k] =
                rows.place(first_row + at.quotient, (i64)at.remainder * VECTOR_NBYTES);
            places[k].target = index <= last ? places[k].target : 0;
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (places[k].target != 0) values[k] = load<Vector>(places[k].source);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (places[k].target != 0) store(places[k].target, values[k]);
        }
    }
}
