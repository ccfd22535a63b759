// The CUDA that the kernels use, for g++: threads one after the other, and every access checked.
//
// Kernels that shuffle run as 256 fibers, which change at each shuffle.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

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

enum What { READ, WRITE, MISALIGNED, DIVERGED, UNDEFINED, SIZE, LANES };

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

const int THREADS = 256, WARP = 32;
const size_t STACK = 1 << 16;

struct Fiber {
    ucontext_t context;
    char* stack;
    unsigned int shuffled;
    bool over;
};

static Fiber fibers[THREADS];
static ucontext_t scheduler;
static int running;
static void (*body)();

static void run_fiber() {
    body();
    fibers[running].over = true;
    swapcontext(&fibers[running].context, &scheduler);
}

static void meet() {
    const int self = running;
    swapcontext(&fibers[self].context, &scheduler);
    threadIdx.x = self;
}

// One CTA: each fiber runs to its next shuffle, again and again.
static void run_fibers() {
    for (int i = 0; i < THREADS; ++i) {
        Fiber& fiber = fibers[i];
        if (fiber.stack == 0) fiber.stack = (char*)malloc(STACK);
        fiber.over = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (int left = THREADS; left > 0;) {
        left = 0;
        for (int i = 0; i < THREADS; ++i) {
            if (fibers[i].over) continue;
            running = threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
            if (!fibers[i].over) ++left;
        }
        for (int i = 0; i < THREADS; ++i) {  // a warp shuffles as a whole, or ends as a whole
            if (fibers[i].over != fibers[i - i % WARP].over) {
                violate(DIVERGED, i, 0);
                return;
            }
        }
    }
}

template <class Params> struct Call {
    static void (*kernel)(Params);
    static Params params;
    static void thread() { kernel(params); }
};
template <class Params> void (*Call<Params>::kernel)(Params);
template <class Params> Params Call<Params>::params;

template <class Params>
void run(void (*kernel)(Params), const void* params, uint64_t nbytes, unsigned int grid,
         unsigned int first, unsigned int last, bool shuffles) {
    if (nbytes != sizeof(Params)) return violate(SIZE, sizeof(Params), nbytes);
    Call<Params>::kernel = kernel;
    memcpy((void*)&Call<Params>::params, params, sizeof(Params));
    body = Call<Params>::thread;
    gridDim.x = grid;
    for (blockIdx.x = first; blockIdx.x < last; ++blockIdx.x) {
        if (shuffles) {
            run_fibers();
            continue;
        }
        for (threadIdx.x = 0; threadIdx.x < (unsigned)THREADS; ++threadIdx.x) body();
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

static float __uint_as_float(unsigned int bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static unsigned int __float_as_uint(float value) {
    unsigned int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static int __float2int_rn(float value) { return (int)nearbyintf(value); }

static unsigned int __shfl_xor_sync(unsigned int mask, unsigned int value, int lanes) {
    if (mask != 0xffffffffu || lanes <= 0 || lanes >= shim::WARP) {
        shim::violate(shim::LANES, mask, lanes);
    }
    const int self = shim::running;
    shim::fibers[self].shuffled = value;
    shim::meet();
    const unsigned int other = shim::fibers[self ^ lanes].shuffled;
    shim::meet();  // before anybody shuffles again
    return other;
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
