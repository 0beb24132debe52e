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

// A left operand from some row and column on: numbers to the 16 rows below, and to the tile of the next 32 columns;
// bytes between its rows.
struct LeftTiles {
    const bf16* at;
    int64_t below, next, row_bytes;
};

// One block: out = or += 16 or 32 rows times 32 columns, of depth `depth` tiles. Rows of `out` are out_row apart.
inline void tile_block(LeftTiles left, bool both, const bf16* right, int64_t depth, float* out, int64_t out_row,
                       bool add = false) {
    float* lower = out + 16 * out_row;
    if (add) {
        TILE_LOAD(0, out, out_row * 4);
        TILE_LOAD(1, out + 16, out_row * 4);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
    }
    if (both) {
        if (add) {
            TILE_LOAD(2, lower, out_row * 4);
            TILE_LOAD(3, lower + 16, out_row * 4);
        } else {
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
        for (int64_t k = 0; k < depth; k++) {
            TILE_LOAD(6, right + k * 2 * TILE, 64);
            TILE_LOAD(4, left.at + k * left.next, left.row_bytes);
            TILE_LOAD(7, right + (k * 2 + 1) * TILE, 64);
            TILE_LOAD(5, left.at + left.below + k * left.next, left.row_bytes);
            TILE_PRODUCT(0, 4, 6);
            TILE_PRODUCT(1, 4, 7);
            TILE_PRODUCT(2, 5, 6);
            TILE_PRODUCT(3, 5, 7);
        }
        TILE_STORE(2, lower, out_row * 4);
        TILE_STORE(3, lower + 16, out_row * 4);
    } else {
        for (int64_t k = 0; k < depth; k++) {
            TILE_LOAD(4, left.at + k * left.next, left.row_bytes);
            TILE_LOAD(6, right + k * 2 * TILE, 64);
            TILE_LOAD(7, right + (k * 2 + 1) * TILE, 64);
            TILE_PRODUCT(0, 4, 6);
            TILE_PRODUCT(1, 4, 7);
        }
    }
    TILE_STORE(0, out, out_row * 4);
    TILE_STORE(1, out + 16, out_row * 4);
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
                    tile_block({upper, step, TILE, 64}, end - row > 16, weights, depth, block, 32);
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

// Of rows x [32, 16], of which there are `left`: a tile of a right operand whose summed dimension are the rows, and one of
// a left operand, the other way round.
inline void pair_tile(const bf16* x, int64_t stride, int64_t left, bf16* tile) {
    for (int64_t p = 0; p < 16; p++)
        _mm512_storeu_si512(tile + p * 32, pair_rows(x + p * 2 * stride, stride, left - p * 2));
}
inline void turned_tile(const bf16* x, int64_t stride, int64_t left, bf16* tile) {
    alignas(64) bf16 pairs[TILE];
    pair_tile(x, stride, left, pairs);
    transpose(pairs, 64, 16, tile, 64);
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
            pair_tile(x + (m0 + k * 32) * x_stride + column * 16, x_stride, rows - k * 32,
                      right + (column / 2 * depth * 2 + k * 2 + column % 2) * TILE);
        }
        for (int64_t n0 = 0; n0 < N; n0 += SLAB_ROWS) {
            const int64_t height = std::min(SLAB_ROWS, N - n0);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < height / 16 * depth; t++) {
                const int64_t row = t / depth, k = t % depth;
                turned_tile(dy + (m0 + k * 32) * dy_stride + n0 + row * 16, dy_stride, rows - k * 32,
                            left + (row * depth + k) * TILE);
            }
            const int64_t blocks = tiles(height, 32), groups = tiles(K, SLAB_COLUMNS);
#pragma omp for schedule(dynamic, 1)
            for (int64_t job = 0; job < blocks * groups; job++)
                for (int64_t k = job / blocks * SLAB_COLUMNS; k < std::min(K, (job / blocks + 1) * SLAB_COLUMNS); k += 32) {
                    const int64_t n = job % blocks * 32;
                    tile_block({left + n / 16 * depth * TILE, depth * TILE, TILE, 64}, height - n > 16,
                               right + k / 32 * depth * 2 * TILE, depth, total + (n0 + n) * K + k, K, true);
                }
        }
    }
}

}  // namespace

namespace spans {

// See `Floats`. Everything is filled up with zeros to whole blocks of 32 rows and 32 columns. What is summed over rows of a
// block is collected the other way round, [dim, keys]: so the smaller operand is the one to be turned.
class OnTiles {
  public:
    typedef bf16 T;
    static constexpr int64_t ROWS = 96, STEP = 32;
    std::vector<bf16> queries, grads;

    OnTiles(const Shape& shape, int64_t most, int64_t longest, bool learns)
        : queries(most * shape.dim), grads(learns ? most * shape.dim : 0), registers(16), dim(shape.dim), deep(dim / 32),
          learns(learns), rows(longest * dim), keys(learns ? longest * dim : 0), keys_t(longest * dim),
          values(longest * dim), values_t(learns ? longest * dim : 0), left(most * (longest + 32)),
          pairs(learns ? most * longest : 0) {
        for (int j = 0; learns && j < 2; j++) {
            turned[j].resize(most * dim);
            sums[j].resize(longest * dim);
        }
        if (learns) given.resize(longest * dim);
    }

    void begin(const Rows<bf16>& k, const Rows<bf16>& v, const Span& span, int64_t g) {
        wide = padded(span.keys(), STEP);
        gather(k, span, g);
        turn(keys_t);
        if (learns) pair(rows.data(), dim, wide, dim, keys.data());
        gather(v, span, g);
        pair(rows.data(), dim, wide, dim, values.data());
        if (learns) turn(values_t);
        for (auto& sum : sums) std::fill(sum.begin(), sum.begin() + (learns ? dim * wide : 0), 0.0f);
    }
    void ready(const Block& b) {
        height = padded(b.rows, STEP);
        std::fill(queries.begin() + b.rows * dim, queries.begin() + height * dim, (bf16)0);
        if (!learns) return;
        std::fill(grads.begin() + b.rows * dim, grads.begin() + height * dim, (bf16)0);
        for (int j = 0; j < 2; j++)
            for (int64_t d = 0; d < dim; d += 16)
                for (int64_t r = 0; r < height; r += 32)
                    turned_tile((j ? grads : queries).data() + r * dim + d, dim, 32,
                                turned[j].data() + (d / 16 * (height / 32) + r / 32) * TILE);
    }
    void score(const Block& b, float* scores) { against(b, queries, keys_t, scores); }
    void score_gradients(const Block& b, float* scores) { against(b, grads, values_t, scores); }
    void mix(const Block& b, const float* scores, float* out) { weigh(b, scores, values, out); }
    void pull(const Block& b, const float* scores, float* out) { weigh(b, scores, keys, out); }
    void collect(const Block& b, const float* probs, const float*) {
        give(b, 0);  // `pull` has rounded the gradients of scores
        round(b, probs);
        give(b, 1);
    }
    const float* collected(int64_t n, int which) {
        for (int64_t s = 0; s < n; s += 16)
            for (int64_t d = 0; d < dim; d += 16)
                transpose(sums[which].data() + d * wide + s, wide * 4, 16, given.data() + s * dim + d, dim * 4);
        return given.data();
    }

  private:
    TileRegisters registers;
    int64_t dim, deep, wide = 0, height = 0;
    bool learns;
    std::vector<bf16> rows, keys, keys_t, values, values_t, turned[2], left, pairs;
    std::vector<float> sums[2], given;

    static constexpr int64_t between(const Block& b) { return b.width + 32; }  // rows of `left`: not in one set of the cache

    void gather(const Rows<bf16>& x, const Span& span, int64_t g) {
        take_keys(x, span, g, dim, rows.data());
        std::fill(rows.begin() + span.keys() * dim, rows.begin() + wide * dim, (bf16)0);
    }
    // Keys as columns of a right operand.
    void turn(std::vector<bf16>& to) {
        for (int64_t s = 0; s < wide; s += 16)
            for (int64_t k = 0; k < deep; k++)
                transpose(rows.data() + s * dim + k * 32, dim * 2, 16, to.data() + ((s / 32 * deep + k) * 2 + s / 16 % 2) * TILE, 64);
    }
    // Rows [n, width] as the summed dimension of one.
    static void pair(const bf16* x, int64_t stride, int64_t n, int64_t width, bf16* to) {
        for (int64_t c = 0; c < width; c += 16)
            for (int64_t k = 0; k < n; k += 32)
                pair_tile(x + k * stride + c, stride, 32, to + ((c / 32 * (n / 32) + k / 32) * 2 + c / 16 % 2) * TILE);
    }
    // `panel`: numbers between panels of the right operand.
    static void product(LeftTiles a, int64_t M, int64_t N, int64_t depth, const bf16* b, int64_t panel, float* out,
                        int64_t out_row, bool add = false) {
        for (int64_t n = 0; n < N; n += 32)
            for (int64_t m = 0; m < M; m += 32)
                tile_block({a.at + m / 16 * a.below, a.below, a.next, a.row_bytes}, true, b + n / 32 * panel, depth,
                           out + m * out_row + n, out_row, add);
    }
    void against(const Block& b, const std::vector<bf16>& x, const std::vector<bf16>& columns, float* scores) {
        const int64_t panel = deep * 2 * TILE;
        product({x.data(), 16 * dim, 32, dim * 2}, height, b.width, deep, columns.data() + b.begin / 32 * panel, panel,
                scores, b.width);
    }
    void round(const Block& b, const float* scores) {
        for (int64_t r = 0; r < height; r++)
            for (int64_t s = 0; s < b.width; s += 16)
                _mm256_storeu_si256((__m256i*)(left.data() + r * between(b) + s),
                                    r < b.rows ? round16(load16(scores + r * b.width + s)) : _mm256_setzero_si256());
    }
    void weigh(const Block& b, const float* scores, const std::vector<bf16>& right, float* out) {
        round(b, scores);
        product({left.data(), 16 * between(b), 32, between(b) * 2}, height, dim, b.width / 32,
                right.data() + b.begin / 32 * 2 * TILE, wide / 32 * 2 * TILE, out, dim);
    }
    // The rounded scores, or their gradients, times what they belong to.
    void give(const Block& b, int which) {
        const int64_t depth = height / 32;
        pair(left.data(), between(b), height, b.width, pairs.data());
        product({turned[which].data(), depth * TILE, TILE, 64}, dim, b.width, depth, pairs.data(), depth * 2 * TILE,
                sums[which].data() + b.begin, wide, true);
    }
};

}  // namespace spans

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
EXPORT_SPANS(bf16, spans::OnTiles)
}

#else

extern "C" int64_t amx_available() { return 0; }

#endif
