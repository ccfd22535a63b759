// quantize_blocks and dequantize_blocks: one float32 scale for each row, the elements of one head
// of one token. ELEMENT_BITS is 32 (float32), 16 (float16) or 8 (bfloat16: 8 bits of exponent); E4M3
// is 1 (float8_e4m3fn) or 0 (int8).

#if ELEMENT_BITS == 32
typedef u32 Element;
#else
typedef u16 Element;
#endif

constexpr int PER_VECTOR = VECTOR_NBYTES / sizeof(Element);

template <int NBYTES> struct Bytes;
template <> struct Bytes<1> { typedef u8 Type; };
template <> struct Bytes<2> { typedef u16 Type; };
template <> struct Bytes<4> { typedef u32 Type; };
template <> struct Bytes<8> { typedef uint2 Type; };
typedef typename Bytes<PER_VECTOR>::Type Packed;

union Elements {
    Vector vector;
    Element element[PER_VECTOR];
};

union Quantized {
    Packed packed;
    u8 byte[PER_VECTOR];
};

// One of the planes (a layer's keys or values) of a block: 48 bytes in device memory.
enum PlaneColumn {
    BASE, BLOCK_STRIDE, OUTER_STRIDE, INNER_STRIDE, VALUES_OFFSET, SCALES_OFFSET, PLANE_COLUMNS
};

struct QuantizeParams {
    i64 planes;  // [planes, PLANE_COLUMNS] int64
    Ids blocks;
    Ids places;  // rows of values and scales
    i64 pairs;
    i64 values;
    i64 values_stride;
    i64 scales;
    i64 scales_stride;
    i64 vectors;  // of one row
    i64 lanes;    // quantize: threads that share a row: a power of two, at most 32
    i64 errors;
    Span span;  // quantize: `vectors` counts rows
    Divisor inner;
    Divisor outer;
    Divisor num_planes;
};

struct RowPlace {
    i64 elements;  // 0: not to be touched
    i64 values;
    i64 scale;
};

__device__ __forceinline__ RowPlace place_of(const QuantizeParams& p, u32 row) {
    const Split at = split(row, p.inner);
    const Split of = split(at.quotient, p.outer);
    const Split in = split(of.quotient, p.num_planes);
    const i64 inner = at.remainder, outer = of.remainder;
    i64 block = load_id(p.blocks, in.quotient), place = load_id(p.places, in.quotient);
    const bool wanted = is_valid(block, p.blocks) & is_valid(place, p.places);
    block = wanted ? block : 0;
    place = wanted ? place : 0;
    const i64 plane = p.planes + in.remainder * (PLANE_COLUMNS * (i64)sizeof(i64));
    const i64 in_plane = outer * p.inner.divisor + inner;
    RowPlace found;
    found.elements = load_word(plane, BASE) + block * load_word(plane, BLOCK_STRIDE) +
                     outer * load_word(plane, OUTER_STRIDE) +
                     inner * load_word(plane, INNER_STRIDE);
    found.values = p.values + place * p.values_stride + load_word(plane, VALUES_OFFSET) +
                   in_plane * p.vectors * PER_VECTOR;
    found.scale = p.scales + place * p.scales_stride + load_word(plane, SCALES_OFFSET) +
                  in_plane * (i64)sizeof(float);
    found.elements = wanted ? found.elements : 0;
    return found;
}

__device__ __forceinline__ float to_float(Element bits) {
#if ELEMENT_BITS == 32
    return __uint_as_float(bits);
#elif ELEMENT_BITS == 8
    return __uint_as_float((u32)bits << 16);
#else
    // The exponent moves by 112; infinity and NaN keep the highest one.
    const u32 magnitude = bits & 0x7fffu;
    u32 wide = __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f);
    if (magnitude >= 0x7c00u) wide |= 0x7f800000u;
    return __uint_as_float(wide | ((u32)(bits & 0x8000u) << 16));
#endif
}

// Rounds to nearest, halves to even.
__device__ __forceinline__ Element from_float(float value) {
    const u32 bits = __float_as_uint(value);
#if ELEMENT_BITS == 32
    return bits;
#elif ELEMENT_BITS == 8
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (Element)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#else
    const u32 sign = (bits >> 16) & 0x8000u;
    u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7e00;
    if (magnitude >= 0x477ff000u) return (Element)(sign | 0x7c00u);  // from 65520 on: infinity
    if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 leaves multiples of 2^-24
        const float rounded = __uint_as_float(magnitude) + 0.5f;
        return (Element)(sign | (__float_as_uint(rounded) - 0x3f000000u));
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    return (Element)(sign | ((magnitude >> 13) - (112u << 10)));
#endif
}

#if E4M3

constexpr float LIMIT = 448.0f;

// |value| <= 448.
__device__ __forceinline__ u8 quantize_one(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    return (u8)pair;
#else
    const u32 bits = __float_as_uint(value);
    const u32 sign = (bits >> 24) & 0x80u;
    u32 magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 leaves multiples of 2^-9
        const float rounded = __uint_as_float(magnitude) + 0x1p14f;
        return (u8)(sign | (__float_as_uint(rounded) - 0x46800000u));
    }
    magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);
    return (u8)(sign | ((magnitude >> 20) - (120u << 3)));
#endif
}

__device__ __forceinline__ float dequantize_one(u8 bits) {
    const u32 magnitude = bits & 0x7fu;
    u32 wide = __float_as_uint(__uint_as_float(magnitude << 20) * 0x1p120f);
    if (magnitude == 0x7fu) wide = 0x7fc00000u;
    return __uint_as_float(wide | ((u32)(bits & 0x80u) << 24));
}

#else

constexpr float LIMIT = 127.0f;

__device__ __forceinline__ u8 quantize_one(float value) {
    return (u8)__float2int_rn(value);
}

__device__ __forceinline__ float dequantize_one(u8 bits) {
    return (float)(signed char)bits;
}

#endif

// What a row is multiplied by, of the bits of its largest magnitude.
struct Scaling {
    float inverse;
    float scale;
    bool usable;  // else every value is 0: all are zero (also -0), or one is not finite
};

__device__ __forceinline__ Scaling scaling_of(u32 largest_bits) {
    const float largest = __uint_as_float(largest_bits);
    Scaling found;
    const bool finite = largest_bits < 0x7f800000u;
    found.usable = finite && largest_bits != 0;
    found.scale = finite ? largest / LIMIT : __uint_as_float(0x7fc00000u);
    found.inverse = fminf(LIMIT / largest, __uint_as_float(0x7f7fffffu));
    return found;
}

__device__ __forceinline__ Packed quantize_vector(Vector vector, const Scaling& by) {
    Elements from;
    Quantized to;
    from.vector = vector;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
        const float scaled = to_float(from.element[i]) * by.inverse;
        const float bounded = fminf(fmaxf(scaled, -LIMIT), LIMIT);
        to.byte[i] = by.usable ? quantize_one(bounded) : (u8)0;
    }
    return to.packed;
}

__device__ __forceinline__ u32 largest_of(Vector vector, u32 largest) {
    Elements from;
    from.vector = vector;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
        // As integers magnitudes have the same order, and NaN is above infinity.
        const u32 bits = __float_as_uint(to_float(from.element[i])) & 0x7fffffffu;
        if (bits > largest) largest = bits;
    }
    return largest;
}

// The vectors of a row from `first` on that a thread takes at once.
__device__ __forceinline__ void load_some(
    Vector (&some)[UNROLL], const RowPlace& row, i64 first, int lanes, i64 vectors) {
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const i64 index = first + k * lanes;
        if (row.elements != 0 && index < vectors) {
            some[k] = load<Vector>(row.elements + index * VECTOR_NBYTES);
        }
    }
}

__device__ __forceinline__ void store_some(
    const Vector (&some)[UNROLL], const RowPlace& row, i64 first, int lanes, i64 vectors,
    const Scaling& by) {
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const i64 index = first + k * lanes;
        if (row.elements != 0 && index < vectors) {
            store(row.values + index * PER_VECTOR, quantize_vector(some[k], by));
        }
    }
}

KERNEL quantize(const __grid_constant__ QuantizeParams p) {
    count_bad_ids(p.blocks, p.pairs, p.errors);
    const int lanes = (int)p.lanes, rows = THREADS / lanes;
    const int lane = (int)threadIdx.x & (lanes - 1), number = (int)threadIdx.x / lanes;
    const i64 stride = lanes * UNROLL;
    // The bounds are the same for a whole warp, so all of it shuffles.
    for (i64 begin = (i64)blockIdx.x * rows; begin < p.span.vectors;
         begin += (i64)gridDim.x * rows) {
        RowPlace row = {0, 0, 0};
        if (begin + number < p.span.vectors) {
            row = place_of(p, (u32)(p.span.first + begin + number));
        }
        Vector some[UNROLL];
        u32 largest = 0;
        for (i64 at = lane; at < p.vectors; at += stride) {
            load_some(some, row, at, lanes, p.vectors);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) {
                if (row.elements != 0 && at + k * lanes < p.vectors) {
                    largest = largest_of(some[k], largest);
                }
            }
        }
        for (int mask = lanes / 2; mask > 0; mask /= 2) {
            const u32 other = __shfl_xor_sync(0xffffffffu, largest, mask);
            if (other > largest) largest = other;
        }
        const Scaling by = scaling_of(largest);
        if (row.elements != 0 && lane == 0) store(row.scale, by.scale);
        if (p.vectors <= stride) {  // the row is still in registers
            store_some(some, row, lane, lanes, p.vectors, by);
        } else {
            for (i64 at = lane; at < p.vectors; at += stride) {
                load_some(some, row, at, lanes, p.vectors);
                store_some(some, row, at, lanes, p.vectors, by);
            }
        }
    }
}

KERNEL dequantize(const __grid_constant__ QuantizeParams p) {
    count_bad_ids(p.blocks, p.pairs, p.errors);
    const u32 last = (u32)p.span.vectors - 1, first_row = (u32)p.span.first;
    for (i64 begin = (i64)blockIdx.x * TILE; begin <= last; begin += (i64)gridDim.x * TILE) {
        i64 targets[UNROLL];
        Quantized values[UNROLL];
        float scales[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const u32 index = (u32)begin + k * THREADS + threadIdx.x;
            const Split at = split(index <= last ? index : last, p.span.vectors_per_row);
            const RowPlace row = place_of(p, first_row + at.quotient);
            targets[k] = 0;
            if (row.elements != 0 && index <= last) {
                targets[k] = row.elements + (i64)at.remainder * VECTOR_NBYTES;
                values[k].packed = load<Packed>(row.values + (i64)at.remainder * PER_VECTOR);
                scales[k] = load<float>(row.scale);
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (targets[k] == 0) continue;
            Elements result;
#pragma unroll
            for (int i = 0; i < PER_VECTOR; ++i) {
                result.element[i] = from_float(dequantize_one(values[k].byte[i]) * scales[k]);
            }
            store(targets[k], result.vector);
        }
    }
}
