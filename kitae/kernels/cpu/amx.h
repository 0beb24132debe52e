// Matrix products on the tile registers of AMX, and a decoder built around them. Included by cpu.cpp.
//
// Operands are cut into tiles of 1 KiB. The left one is "blocked": [rows / 16][K / 32] tiles of 16 rows of 32 numbers.
// The right one is "packed" in panels of 32 columns: [columns / 32][K / 32][2] tiles of 16 columns, in which two
// neighbours along K lie side by side, as the instruction wants them. A product is computed in blocks of 32 x 32 floats,
// and each block is handed to a function that rounds it and puts it where the next part wants it. Rows and columns
// beyond the end are computed and thrown away. All functions here except the exported ones run within a parallel region.

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t TILE = 512;  // numbers of bfloat16

inline int64_t tiles(int64_t n, int64_t size) { return (n + size - 1) / size; }

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

constexpr int64_t ROWS_AT_A_TIME = 512;  // as much of the left operand as stays in the cache next to the core

// blocked [M, K] times packed [K, N]; put(block, row, rows, column, columns) gets every block.
template <typename Put>
void product(const bf16* left, const bf16* right, int64_t M, int64_t N, int64_t K, const Put& put) {
    const int64_t depth = K / 32, step = depth * TILE, panels = tiles(N, 32), parts = tiles(M, ROWS_AT_A_TIME);
    // Several panels a job: fewer, longer writes. Few enough to keep all threads busy to the end.
    const int64_t width = std::max<int64_t>(1, std::min<int64_t>(4, panels * parts / (8 * omp_get_num_threads())));
    const int64_t jobs = tiles(panels, width);
    alignas(64) float block[32 * 32];
#pragma omp for schedule(dynamic, 1)
    for (int64_t job = 0; job < parts * jobs; job++) {
        const int64_t first = job / jobs * ROWS_AT_A_TIME, end = std::min(M, first + ROWS_AT_A_TIME);
        const int64_t begin = job % jobs * width, after = std::min(panels, begin + width);
        for (int64_t row = first; row < end; row += 32)
            for (int64_t panel = begin; panel < after; panel++) {
                tile_block(left + row / 16 * step, step, end - row > 16, right + panel * depth * 2 * TILE, depth, block);
                put(block, row, std::min<int64_t>(32, end - row), panel * 32, std::min<int64_t>(32, N - panel * 32));
            }
    }
}

inline __m256i round16(vec x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
inline void put16(bf16* p, vec x) { _mm256_storeu_si256((__m256i*)p, round16(x)); }
inline vec rounded(vec x) { return (vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round16(x)), 16)); }
inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? (__mmask16)0xffff : n <= 0 ? (__mmask16)0 : (__mmask16)((1u << n) - 1); }

// Where number (row, column) of a blocked matrix is.
inline bf16* in_blocked(bf16* base, int64_t row, int64_t column, int64_t K) {
    return base + (row / 16 * (K / 32) + column / 32) * TILE + row % 16 * 32 + column % 32;
}

// What becomes of a block: out = round(block + bias), rows of `width`.
struct PutRows {
    bf16* out;
    int64_t width;
    const bf16* bias;
    void operator()(const float* block, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
        for (int64_t half = 0; half < columns; half += 16) {
            const __mmask16 lanes = first_lanes(columns - half);
            vec shift = vec{};
            if (bias)
                shift = (vec)_mm512_castsi512_ps(
                    _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, bias + column + half)), 16));
            for (int64_t i = 0; i < rows; i++)
                _mm256_mask_storeu_epi16(out + (row + i) * width + column + half, lanes,
                                         round16(load16(block + i * 32 + half) + shift));
        }
    }
};

// x = round(x + round(block)); the width is a multiple of 32.
struct AddRows {
    bf16* x;
    int64_t width;
    void operator()(const float* block, int64_t row, int64_t rows, int64_t column, int64_t) const {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t half = 0; half < 32; half += 16) {
                bf16* target = x + (row + i) * width + column + half;
                put16(target, load16(target) + rounded(load16(block + i * 32 + half)));
            }
    }
};

inline vec exp16(vec x) {  // the same as exp_negative, for any x whose result is a normal number
    const __m512 n = _mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec r = x - (vec)n * 0.693145752f - (vec)n * 1.42860677e-6f;
    const vec p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666672f + r * (0.0416666418f + r * (0.00833345205f + r * 0.00138889f)))));
    return (vec)_mm512_scalef_ps((__m512)p, n);
}

// Columns come as 16 of the gate and 16 of the other factor: blocked [row, column / 2] = round(silu(gate)) * up.
struct PutGated {
    bf16* out;
    int64_t width;
    void operator()(const float* block, int64_t row, int64_t rows, int64_t column, int64_t) const {
        for (int64_t i = 0; i < rows; i++) {
            const vec gate = rounded(load16(block + i * 32)), up = rounded(load16(block + i * 32 + 16));
            const vec least = vec{} - 87.0f;
            const vec negative = (vec)_mm512_max_ps((__m512)(vec{} - gate), (__m512)least);
            const vec silu = gate / (1.0f + exp16((vec)_mm512_min_ps((__m512)negative, (__m512)(vec{} + 87.0f))));
            put16(in_blocked(out, row + i, column / 2, width), rounded(silu) * up);
        }
    }
};

// 16 x 16 pairs of numbers, transposed.
inline void transpose_pairs(const bf16* from, int64_t stride, int64_t rows, bf16* to) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = i < rows ? _mm512_loadu_si512(from + i * stride) : _mm512_setzero_si512();
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        _mm512_storeu_si512(to + 32 * j, _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88));
        _mm512_storeu_si512(to + 32 * (4 + j), _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88));
        _mm512_storeu_si512(to + 32 * (8 + j), _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd));
        _mm512_storeu_si512(to + 32 * (12 + j), _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd));
    }
}

// The transpose of a weight [N, K] as a right operand. `tile` counts in units of 16 columns, from `tile_step` to the next.
void pack_weight(const bf16* weight, int64_t N, int64_t K, bf16* packed, int64_t first_tile, int64_t tile_step) {
    const int64_t depth = K / 32;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles(N, 16); t++) {
        const int64_t tile = first_tile + t * tile_step;
        for (int64_t k = 0; k < depth; k++)
            transpose_pairs(weight + t * 16 * K + k * 32, K, N - t * 16,
                            packed + (tile / 2 * depth * 2 + k * 2 + tile % 2) * TILE);
    }
}

// Rows [M, K] as a left operand.
void block_rows(const bf16* rows, int64_t M, int64_t K, bf16* blocked) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++)
        for (int64_t k = 0; k < K; k += 32)
            _mm512_storeu_si512(in_blocked(blocked, m, k, K), _mm512_loadu_si512(rows + m * K + k));
}

// blocked = weight * round(x / rms(x))
void norm_rows(const bf16* x, const bf16* weight, float eps, int64_t M, int64_t H, bf16* blocked) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
        const bf16* row = x + m * H;
        vec square = vec{};
        for (int64_t i = 0; i < H; i += 16) {
            const vec v = load16(row + i);
            square += v * v;
        }
        const float r = 1.0f / std::sqrt(sum16(square) / H + eps);
        for (int64_t i = 0; i < H; i += 16)
            put16(in_blocked(blocked, m, i, H), load16(weight + i) * rounded(load16(row + i) * r));
    }
}

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
                transpose_pairs(pairs, 32, 16, left + (row * depth + k) * TILE);
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

// One layer of a decoder, as Python describes it. All matrices are packed; gate and up alternate in tiles of 16 columns.
struct Layer {
    const bf16 *before_attention, *qkv, *bias, *query_norm, *key_norm, *out, *before_mlp, *gate_up, *down;
    bf16 *keys, *values;
    const float* sinks;
    int64_t window;
    double scale, softcap, eps_attention, eps_mlp, eps_heads;
};

struct Decoder {
    int64_t hidden, heads, kv_heads, dim, inner, page_size;
    const bf16 *cos, *sin;
    // Room for as many rows as there are: x [T, hidden], qkv [T, (heads + 2 kv_heads) dim], and blocked left operands.
    bf16 *x, *qkv, *normed, *mixed, *gated;
};

namespace {

// Norm (if any) and rotary of one head, in place, rounding where the modules round.
void rotate(bf16* head, const bf16* norm, float eps, const bf16* cos, const bf16* sin, int64_t dim) {
    if (norm) {
        float square = 0;
        for (int64_t i = 0; i < dim; i++) square += load(head + i) * load(head + i);
        const float r = 1.0f / std::sqrt(square / dim + eps);
        for (int64_t i = 0; i < dim; i++) {
            bf16 scaled;
            store(&scaled, load(head + i) * r);
            store(head + i, load(norm + i) * load(&scaled));
        }
    }
    rotate_head(head, cos, sin, dim, false);
}

// Rotates one row's queries and the keys, and writes key and value of one head group to their slot of the cache.
void rotate_and_store(const Decoder& d, const Layer& l, bf16* row, int64_t group, int64_t position, int64_t slot) {
    const int64_t repeat = d.heads / d.kv_heads, page = slot / d.page_size, place = slot % d.page_size;
    const bf16 *cos = d.cos + position * d.dim, *sin = d.sin + position * d.dim;
    bf16 *key = row + (d.heads + group) * d.dim, *value = key + d.kv_heads * d.dim;
    for (int64_t h = group * repeat; h < (group + 1) * repeat; h++)
        rotate(row + h * d.dim, l.query_norm, (float)l.eps_heads, cos, sin, d.dim);
    rotate(key, l.key_norm, (float)l.eps_heads, cos, sin, d.dim);
    const int64_t home = ((page * d.kv_heads + group) * d.page_size + place) * d.dim;
    memcpy(l.keys + home, key, d.dim * sizeof(bf16));
    memcpy(l.values + home, value, d.dim * sizeof(bf16));
}

void finish_layer(const Decoder& d, const Layer& l, int64_t T) {
    product(d.mixed, l.out, T, d.hidden, d.heads * d.dim, AddRows{d.x, d.hidden});
    norm_rows(d.x, l.before_mlp, (float)l.eps_mlp, T, d.hidden, d.normed);
    product(d.normed, l.gate_up, T, 2 * d.inner, d.hidden, PutGated{d.gated, d.inner});
    product(d.gated, l.down, T, d.hidden, d.inner, AddRows{d.x, d.hidden});
}

// The sums over the lanes of sixteen vectors, in order.
inline vec sums_of(const __m512* v) {
    __m512 quads[4];
    for (int i = 0; i < 4; i++) {
        const __m512 *a = v + 4 * i, ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    __m512 halves[2];
    for (int i = 0; i < 2; i++)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x44),
                                  _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xee));
    return (vec)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                              _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

inline void fetch(const bf16* p, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += 32) _mm_prefetch(p + i, _MM_HINT_T0);
}

// `attend` for bfloat16: dot products by pairs, sixteen keys at a time. scores: R rows of n rounded up to 16.
template <int DIM, int R>
void attend_pairs(const bf16* const* q, bf16* const* out, const Pages<bf16>& keys, const Pages<bf16>& values,
                  int64_t first, int64_t n, float* scores, float scale, float softcap, const float* sinks) {
    constexpr int P = DIM / 32, C = DIM / 16;
    const int64_t width = tiles(n, 16) * 16 + 16;
    __m512bh query[R][P];
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) query[r][p] = (__m512bh)_mm512_loadu_si512(q[r] + 32 * p);
    for (int64_t begin = first; begin < n; begin += 16) {
        const int64_t count = std::min<int64_t>(16, n - begin);
        __m512 dots[R][16];
        for (int64_t j = 0; j < 16; j++) {
            const bf16* key = keys.at(begin + std::min(j, count - 1));
            if (begin + j + 16 < n) fetch(keys.at(begin + j + 16), DIM);
            for (int r = 0; r < R; r++) dots[r][j] = _mm512_setzero_ps();
            for (int p = 0; p < P; p++) {
                const __m512bh k = (__m512bh)_mm512_loadu_si512(key + 32 * p);
                for (int r = 0; r < R; r++) dots[r][j] = _mm512_dpbf16_ps(dots[r][j], query[r][p], k);
            }
        }
        for (int r = 0; r < R; r++) {
            const vec score = sums_of(dots[r]) * scale;
            memcpy(scores + r * width + begin - first, &score, sizeof score);
        }
    }
    const int64_t span = n - first;
    for (int r = 0; r < R; r++) {
        float* row = scores + r * width;
        if (softcap > 0)
            for (int64_t t = 0; t < span; t++) row[t] = softcap * std::tanh(row[t] / softcap);
        for (int64_t t = span; t < tiles(span, 16) * 16; t++) row[t] = -INFINITY;
        __m512 largest = _mm512_set1_ps(sinks ? sinks[r] : -INFINITY);
        for (int64_t t = 0; t < span; t += 16) largest = _mm512_max_ps(largest, (__m512)load16(row + t));
        const float top = _mm512_reduce_max_ps(largest);
        vec total = vec{};
        for (int64_t t = 0; t < span; t += 16) {
            const vec e = exp16((vec)_mm512_max_ps((__m512)(load16(row + t) - top), _mm512_set1_ps(-87.0f)));
            const vec kept = (vec)_mm512_maskz_mov_ps(first_lanes(span - t), (__m512)e);
            memcpy(row + t, &kept, sizeof kept);
            total += kept;
        }
        const float inverse = 1.0f / (sum16(total) + (sinks ? std::exp(sinks[r] - top) : 0.0f));
        for (int64_t t = 0; t < span; t += 16) {
            const vec p = load16(row + t) * inverse;
            memcpy(row + t, &p, sizeof p);
        }
    }
    vec mixed[R][C] = {};
    for (int64_t t = first; t < n; t++) {
        const bf16* value = values.at(t);
        if (t + 8 < n) fetch(values.at(t + 8), DIM);
        for (int c = 0; c < C; c++) {
            const vec v = load16(value + 16 * c);
            for (int r = 0; r < R; r++) mixed[r][c] += scores[r * width + t - first] * v;
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) put16(out[r] + 16 * c, mixed[r][c]);
}

template <int DIM, int R>
constexpr auto attend_with() {
    if constexpr (DIM % 32 == 0)
        return attend_pairs<DIM, R>;
    else
        return attend<bf16, DIM, R>;
}

// Row t attends to its sequence, whose pages are row `sequence[t]` of the table, up to its own position.
template <int DIM>
void attend_rows(const Decoder& d, const Layer& l, const int64_t* positions, const int64_t* sequence,
                 const int32_t* table, int64_t width, int64_t T, std::vector<float>& scores) {
    const int64_t repeat = d.heads / d.kv_heads, row_width = (d.heads + 2 * d.kv_heads) * DIM;
    const int64_t stride = d.kv_heads * d.page_size * DIM;
#pragma omp for collapse(2) schedule(dynamic, 6)
    for (int64_t t = 0; t < T; t++)
        for (int64_t g = 0; g < d.kv_heads; g++) {
            const int32_t* pages = table + sequence[t] * width;
            const int64_t n = positions[t] + 1, offset = g * d.page_size * DIM;
            const int64_t first = l.window > 0 && n > l.window ? n - l.window : 0;
            const bf16* row = d.qkv + t * row_width;
            const Pages<bf16> keys{l.keys, pages, d.page_size, stride, offset, DIM};
            const Pages<bf16> values{l.values, pages, d.page_size, stride, offset, DIM};
            if ((int64_t)scores.size() < 4 * (n + 32)) scores.resize(8 * (n + 32));
            alignas(64) bf16 mixed[4 * DIM];
            for (int64_t h = g * repeat; h < (g + 1) * repeat; h += 4) {
                const int64_t count = std::min<int64_t>(4, (g + 1) * repeat - h);
                const bf16* queries[4];
                bf16* targets[4];
                for (int64_t r = 0; r < count; r++) {
                    queries[r] = row + (h + r) * DIM;
                    targets[r] = mixed + r * DIM;
                }
                const auto run = count == 4   ? attend_with<DIM, 4>()
                                 : count == 3 ? attend_with<DIM, 3>()
                                 : count == 2 ? attend_with<DIM, 2>()
                                              : attend_with<DIM, 1>();
                run(queries, targets, keys, values, first, n, scores.data(), (float)l.scale, (float)l.softcap,
                    l.sinks ? l.sinks + h : nullptr);
                for (int64_t i = 0; i < count * DIM; i += 16)
                    memcpy(in_blocked(d.mixed, t, h * DIM + i, d.heads * DIM), mixed + i, 16 * sizeof(bf16));
            }
        }
}

// Queries, keys and values of T rows, rotated; keys and values are in their slots afterwards.
void project(const Decoder& d, const Layer& l, const int64_t* positions, const int64_t* slots, int64_t T) {
    const int64_t width = (d.heads + 2 * d.kv_heads) * d.dim;
    norm_rows(d.x, l.before_attention, (float)l.eps_attention, T, d.hidden, d.normed);
    product(d.normed, l.qkv, T, width, d.hidden, PutRows{d.qkv, width, l.bias});
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; t++)
        for (int64_t g = 0; g < d.kv_heads; g++)
            rotate_and_store(d, l, d.qkv + t * width, g, positions[t], slots[t]);
}

}  // namespace

extern "C" {

// Whether the processor has the tiles and the system lets this process use them.
int64_t amx_available() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

// What Python compares its own descriptions with.
int64_t amx_layer_size() { return sizeof(Layer); }
int64_t amx_decoder_size() { return sizeof(Decoder); }

void amx_pack(const bf16* weight, int64_t N, int64_t K, bf16* packed, int64_t first_tile, int64_t tile_step) {
#pragma omp parallel
    pack_weight(weight, N, K, packed, first_tile, tile_step);
}

// out [M, N] = x [M, K] times a packed matrix, plus a bias; `room` holds x blocked.
void amx_linear(const bf16* x, const bf16* packed, const bf16* bias, bf16* out, int64_t M, int64_t N, int64_t K,
                bf16* room) {
#pragma omp parallel
    {
        TileRegisters registers(M);
        block_rows(x, M, K, room);
        product(room, packed, M, N, K, PutRows{out, N, bias});
    }
}

void amx_add_outer(const bf16* dy, int64_t dy_stride, const bf16* x, int64_t x_stride, float* total, int64_t M,
                   int64_t N, int64_t K, bf16* left, bf16* right) {
#pragma omp parallel
    {
        TileRegisters registers(16);
        add_outer(dy, dy_stride, x, x_stride, total, M, N, K, left, right);
    }
}

// The first half of a layer for T rows of x.
void amx_project(const Decoder* d, const Layer* l, const int64_t* positions, const int64_t* slots, int64_t T) {
#pragma omp parallel
    {
        TileRegisters registers(T);
        project(*d, *l, positions, slots, T);
    }
}

// The second half, after attention has given rows `mixed` [T, heads * dim].
void amx_finish_layer(const Decoder* d, const Layer* l, const bf16* mixed, int64_t T) {
#pragma omp parallel
    {
        TileRegisters registers(T);
        block_rows(mixed, T, d->heads * d->dim, d->mixed);
        finish_layer(*d, *l, T);
    }
}

// All layers for T rows: row t is at positions[t] of the sequence whose pages are row sequence[t] of the table, and its
// key and value go to slots[t]. x goes in as embeddings and comes out before the last norm.
void amx_forward(const Decoder* d, const Layer* layers, int64_t count, const int64_t* positions, const int64_t* slots,
                 const int64_t* sequence, const int32_t* table, int64_t width, int64_t T) {
#pragma omp parallel
    {
        TileRegisters registers(T);
        std::vector<float> scores;
        const auto attend_all = d->dim == 16    ? attend_rows<16>
                                : d->dim == 32  ? attend_rows<32>
                                : d->dim == 64  ? attend_rows<64>
                                : d->dim == 80  ? attend_rows<80>
                                : d->dim == 96  ? attend_rows<96>
                                : d->dim == 128 ? attend_rows<128>
                                                : attend_rows<256>;
        for (int64_t i = 0; i < count; i++) {
            project(*d, layers[i], positions, slots, T);
            attend_all(*d, layers[i], positions, sequence, table, width, T, scores);
            finish_layer(*d, layers[i], T);
        }
    }
}
}

#else

extern "C" int64_t amx_available() { return 0; }

#endif
