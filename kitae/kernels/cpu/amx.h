// Matrix products on the tile registers of AMX, and the decoder of decoder.h on them. Included by cpu.cpp.
//
// Operands are cut into tiles of 1 KiB. The left one is "blocked": [rows / 16][K / 32] tiles of 16 rows of 32 numbers.
// The right one is "packed" in panels of 32 columns: [columns / 32][K / 32][2] tiles of 16 columns, in which two
// neighbours along K lie side by side, as the instruction wants them. A product is computed in blocks of 32 x 32 floats.
// Rows and columns beyond the end are computed and thrown away. All functions here except the exported ones run within a
// parallel region.

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t TILE = 512;  // numbers of bfloat16
static_assert(PANEL == 32, "blocks and their functions are those of decoder.h");

// The compiler must know that these read and write memory, which its own intrinsics do not tell it.
#define TILE_LOAD(tile, address, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(address), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, address, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(address), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_PRODUCT(out, left, right) asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #out ::)

// Tiles 0-3 collect, 4 and 5 are the left operand, 6 and 7 the right one. Fewer rows take less time.
struct TileRegisters {
    explicit TileRegisters(int64_t rows) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } setting;
        for (int t = 0; t < 8; t++) {
            setting.row_bytes[t] = 64;
            setting.rows[t] = t < 6 ? (uint8_t)std::min<int64_t>(rows, 16) : 16;
        }
        asm volatile("ldtilecfg %0" ::"m"(setting) : "memory");
    }
    ~TileRegisters() { asm volatile("tilerelease" ::); }
};

// One block: 16 or 32 rows, 32 columns, of depth `depth` tiles, into block[32][32].
inline void tile_block(const bf16* left, int64_t left_step, bool both, const bf16* right, int64_t depth, float* block) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (both) {
        const bf16* lower = left + left_step;
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int64_t k = 0; k < depth; k++) {
            TILE_LOAD(6, right + k * 2 * TILE, 64);
            TILE_LOAD(4, left + k * TILE, 64);
            TILE_LOAD(7, right + (k * 2 + 1) * TILE, 64);
            TILE_LOAD(5, lower + k * TILE, 64);
            TILE_PRODUCT(0, 4, 6);
            TILE_PRODUCT(1, 4, 7);
            TILE_PRODUCT(2, 5, 6);
            TILE_PRODUCT(3, 5, 7);
        }
        TILE_STORE(2, block + 16 * 32, 128);
        TILE_STORE(3, block + 16 * 32 + 16, 128);
    } else {
        for (int64_t k = 0; k < depth; k++) {
            TILE_LOAD(4, left + k * TILE, 64);
            TILE_LOAD(6, right + k * 2 * TILE, 64);
            TILE_LOAD(7, right + (k * 2 + 1) * TILE, 64);
            TILE_PRODUCT(0, 4, 6);
            TILE_PRODUCT(1, 4, 7);
        }
    }
    TILE_STORE(0, block, 128);
    TILE_STORE(1, block + 16, 128);
}

inline __m256i round16(vec x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }

struct Tiles {
    typedef bf16 T;
    typedef TileRegisters Registers;
    static vec load(const bf16* p) { return load16(p); }
    static void put(bf16* p, vec x) { _mm256_storeu_si256((__m256i*)p, round16(x)); }
    static vec rounded(vec x) {
        return (vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round16(x)), 16));
    }
    static int64_t height(int64_t) { return 16; }

    static constexpr int64_t ROWS = 512;  // as much of the left operand as stays in the cache next to the core

    // put(block, row, rows, column, columns) gets [32][32] floats. A thread that finds nothing more to do goes on.
    template <typename Put>
    static void begin_product(const Blocked<bf16>& left, const bf16* right, int64_t M, int64_t N, const Put& put) {
        const int64_t depth = left.K / 32, step = depth * TILE, panels = tiles(N, 32), parts = tiles(M, ROWS);
        // Several panels a job: fewer, longer writes. Few enough to keep all threads busy to the end.
        const int64_t width = std::max<int64_t>(1, std::min<int64_t>(4, panels * parts / (8 * omp_get_num_threads())));
        const int64_t jobs = tiles(panels, width);
        alignas(64) float block[32 * 32];
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t job = 0; job < parts * jobs; job++) {
            const int64_t first = job / jobs * ROWS, end = std::min(M, first + ROWS);
            const int64_t begin = job % jobs * width, after = std::min(panels, begin + width);
            for (int64_t row = first; row < end; row += 32)
                for (int64_t panel = begin; panel < after; panel++) {
                    const bf16 *upper = left.base + row / 16 * step, *weights = right + panel * depth * 2 * TILE;
                    tile_block(upper, step, end - row > 16, weights, depth, block);
                    put(block, row, std::min<int64_t>(32, end - row), panel * 32, std::min<int64_t>(32, N - panel * 32));
                }
        }
    }

    // The transpose of a weight [N, K] as a right operand. `first` and `step` count in units of 16 columns.
    static void pack(const bf16* weight, int64_t N, int64_t K, bf16* packed, int64_t first, int64_t step) {
        const int64_t depth = K / 32;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles(N, 16); t++) {
            const int64_t tile = first + t * step;
            for (int64_t k = 0; k < depth; k++)
                transpose(weight + t * 16 * K + k * 32, K * sizeof(bf16), N - t * 16,
                          packed + (tile / 2 * depth * 2 + k * 2 + tile % 2) * TILE, 64);
        }
    }

    // Dot products by pairs.
    typedef __m512bh Line;
    static Line line(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static __m512 add_dot(__m512 sum, Line a, Line b) { return _mm512_dpbf16_ps(sum, a, b); }
};

// Sixteen numbers of two rows, taking turns; rows that are not there are zeros.
inline __m512i pair_rows(const bf16* rows, int64_t stride, int64_t left) {
    const auto row = [&](int64_t i) {
        return i < left ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(rows + i * stride)))
                        : _mm512_setzero_si512();
    };
    return _mm512_or_si512(row(0), _mm512_slli_epi32(row(1), 16));
}

// A part of the gradient of a weight: total [N, K] += dy [M, N] transposed times x [M, K], in slabs that stay in the
// cache. `left` and `right` are room for SLAB_ROWS x SLAB_DEPTH and K x SLAB_DEPTH numbers.
constexpr int64_t SLAB_ROWS = 2048, SLAB_DEPTH = 1024, SLAB_COLUMNS = 576;

void add_outer(const bf16* dy, int64_t dy_stride, const bf16* x, int64_t x_stride, float* total, int64_t M, int64_t N,
               int64_t K, bf16* left, bf16* right) {
    for (int64_t m0 = 0; m0 < M; m0 += SLAB_DEPTH) {
        const int64_t rows = std::min(SLAB_DEPTH, M - m0), depth = tiles(rows, 32);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < K / 16 * depth; t++) {
            const int64_t column = t / depth, k = t % depth;
            bf16* tile = right + (column / 2 * depth * 2 + k * 2 + column % 2) * TILE;
            for (int64_t p = 0; p < 16; p++) {
                const int64_t m = k * 32 + p * 2;
                _mm512_storeu_si512(tile + p * 32, pair_rows(x + (m0 + m) * x_stride + column * 16, x_stride, rows - m));
            }
        }
        for (int64_t n0 = 0; n0 < N; n0 += SLAB_ROWS) {
            const int64_t height = std::min(SLAB_ROWS, N - n0);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < height / 16 * depth; t++) {
                const int64_t row = t / depth, k = t % depth;
                alignas(64) bf16 pairs[TILE];
                for (int64_t p = 0; p < 16; p++) {
                    const int64_t m = k * 32 + p * 2;
                    const bf16* from = dy + (m0 + m) * dy_stride + n0 + row * 16;
                    _mm512_store_si512(pairs + p * 32, pair_rows(from, dy_stride, rows - m));
                }
                transpose(pairs, 64, 16, left + (row * depth + k) * TILE, 64);
            }
            const int64_t blocks = tiles(height, 32), groups = tiles(K, SLAB_COLUMNS);
#pragma omp for schedule(dynamic, 1)
            for (int64_t job = 0; job < blocks * groups; job++)
                for (int64_t k = job / blocks * SLAB_COLUMNS; k < std::min(K, (job / blocks + 1) * SLAB_COLUMNS); k += 32) {
                    const int64_t n = job % blocks * 32;
                    const bf16 *a = left + n / 16 * depth * TILE, *b = right + k / 32 * depth * 2 * TILE;
                    float* target = total + (n0 + n) * K + k;
                    const bool both = height - n > 16;
                    TILE_LOAD(0, target, K * 4);
                    TILE_LOAD(1, target + 16, K * 4);
                    if (both) {
                        TILE_LOAD(2, target + 16 * K, K * 4);
                        TILE_LOAD(3, target + 16 * K + 16, K * 4);
                    }
                    for (int64_t i = 0; i < depth; i++) {
                        TILE_LOAD(6, b + i * 2 * TILE, 64);
                        TILE_LOAD(4, a + i * TILE, 64);
                        TILE_LOAD(7, b + (i * 2 + 1) * TILE, 64);
                        TILE_PRODUCT(0, 4, 6);
                        TILE_PRODUCT(1, 4, 7);
                        if (both) {
                            TILE_LOAD(5, a + (depth + i) * TILE, 64);
                            TILE_PRODUCT(2, 5, 6);
                            TILE_PRODUCT(3, 5, 7);
                        }
                    }
                    TILE_STORE(0, target, K * 4);
                    TILE_STORE(1, target + 16, K * 4);
                    if (both) {
                        TILE_STORE(2, target + 16 * K, K * 4);
                        TILE_STORE(3, target + 16 * K + 16, K * 4);
                    }
                }
        }
    }
}

}  // namespace

extern "C" {

// Whether the processor has the tiles and the system lets this process use them.
int64_t amx_available() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

void amx_add_outer(const bf16* dy, int64_t dy_stride, const bf16* x, int64_t x_stride, float* total, int64_t M,
                   int64_t N, int64_t K, bf16* left, bf16* right) {
#pragma omp parallel
    {
        TileRegisters registers(16);
        add_outer(dy, dy_stride, x, x_stride, total, M, N, K, left, right);
    }
}

EXPORT_DECODER(bf16, Tiles)
}

#else

extern "C" int64_t amx_available() { return 0; }

#endif
