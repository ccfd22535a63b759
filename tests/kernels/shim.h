// The CUDA that the kernels use, for g++: threads one after the other, and every access checked.

#include <stdint.h>
#include <string.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct Index { unsigned int x; };

static Index threadIdx, blockIdx, gridDim;

namespace shim {

struct Region { uint64_t begin, end, writable; };

enum What { READ, WRITE, MISALIGNED, UNDEFINED, SIZE };

struct Report {
    uint64_t violations;
    uint64_t first_what, first_address, first_nbytes;
    uint64_t reads[17], writes[17];  // by bytes of an access
};

static const Region* regions;
static size_t num_regions;
static Report report;
static size_t last_region;

static void violate(What what, uint64_t address, uint64_t nbytes) {
    if (report.violations++ == 0) {
        report.first_what = what;
        report.first_address = address;
        report.first_nbytes = nbytes;
    }
}

static bool holds(const Region& region, uint64_t address, uint64_t nbytes) {
    return region.begin <= address && nbytes <= region.end - address && address < region.end;
}

static bool allowed(uint64_t address, uint64_t nbytes, uint64_t alignment, bool write) {
    if (address % alignment != 0) {
        violate(MISALIGNED, address, nbytes);
        return false;
    }
    if (last_region >= num_regions || !holds(regions[last_region], address, nbytes)) {
        last_region = 0;
        while (last_region < num_regions && !holds(regions[last_region], address, nbytes)) {
            ++last_region;
        }
    }
    if (last_region == num_regions || (write && !regions[last_region].writable)) {
        violate(write ? WRITE : READ, address, nbytes);
        return false;
    }
    ++(write ? report.writes : report.reads)[nbytes];
    return true;
}

template <class T> T read(const T* pointer) {
    T value;
    memset(&value, 0, sizeof(T));
    if (allowed((uint64_t)pointer, sizeof(T), sizeof(T), false)) value = *pointer;
    return value;
}

template <class T> void write(T* pointer, T value) {
    if (allowed((uint64_t)pointer, sizeof(T), sizeof(T), true)) *pointer = value;
}

const int THREADS = 256;

template <class Params>
void run(void (*kernel)(Params), const void* bytes, uint64_t nbytes, unsigned int grid,
         unsigned int first, unsigned int last) {
    if (nbytes != sizeof(Params)) return violate(SIZE, sizeof(Params), nbytes);
    static Params params;
    memcpy((void*)&params, bytes, sizeof(Params));
    gridDim.x = grid;
    for (blockIdx.x = first; blockIdx.x < last; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < (unsigned)THREADS; ++threadIdx.x) kernel(params);
    }
}

}  // namespace shim

template <class T> T __ldg(const T* pointer) { return shim::read(pointer); }
template <class T> T __ldcs(const T* pointer) { return shim::read(pointer); }
template <class T> void __stcs(T* pointer, T value) { shim::write(pointer, value); }

static unsigned long long atomicAdd(unsigned long long* pointer, unsigned long long value) {
    const unsigned long long before = shim::read(pointer);
    shim::write(pointer, before + value);
    return before;
}

extern "C" {

// `regions` stays where it is for as long as kernels are launched.
void shim_regions(const shim::Region* regions, uint64_t count) {
    shim::regions = regions;
    shim::num_regions = count;
    shim::last_region = 0;
}

// What was seen since this was last asked.
void shim_report(shim::Report* report) {
    *report = shim::report;
    shim::report = shim::Report();
}

void __ubsan_on_report() { shim::violate(shim::UNDEFINED, 0, 0); }

}
