// Kernels for the parts of decoding and training that are slow in plain torch on a CPU.
//
// Plain C interface, no torch headers: it compiles in seconds, and torch's own OpenMP pool runs it. Every kernel has a
// plain-torch twin in the Python code that tests compare it against. Types: float, and bfloat16 held as uint16.
// Accumulation is always in float.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <omp.h>

namespace {

typedef uint16_t bf16;

inline float load(const float* p) { return *p; }
inline float load(const bf16* p) {
    uint32_t bits = (uint32_t)*p << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline void store(float* p, float x) { *p = x; }
inline void store(bf16* p, float x) {  // round to nearest even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp for x <= 0 (softmax after the maximum is taken off); relative error below 2e-7, vectorises.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
    float n = std::nearbyint(x * 1.44269504f);
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666672f + r * (0.0416666418f + r * (0.00833345205f + r * 0.00138889f)))));
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

// Sixteen floats at a time, by the compiler's own vector type: it keeps them in registers on any processor.
typedef float vec __attribute__((vector_size(64)));
typedef uint16_t half_bits __attribute__((vector_size(32)));
typedef uint32_t full_bits __attribute__((vector_size(64)));

inline vec load16(const float* p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline vec load16(const bf16* p) {
    half_bits h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, full_bits) << 16);
}
inline float sum16(vec v) {
    float lanes[16], total = 0;
    memcpy(lanes, &v, sizeof v);
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < 16; i++) total += lanes[i];
    return total;
}

// Where the pages of one sequence and one key-value head are.
template <typename T>
struct Pages {
    const T* base;
    const int32_t* table;
    int64_t page_size, stride, offset, dim;
};

// One position after the other: a division for each would take longer than its arithmetic.
template <typename T>
struct Walk {
    const Pages<T>& pages;
    int64_t page, slot;
    Walk(const Pages<T>& pages, int64_t t) : pages(pages), page(t / pages.page_size), slot(t % pages.page_size) {}
    const T* operator*() const { return pages.base + pages.table[page] * pages.stride + pages.offset + slot * pages.dim; }
    void operator++() {
        if (++slot == pages.page_size) slot = 0, page++;
    }
};

// R query heads that share keys and values, over positions [first, n): two passes, scores in between.
template <typename T, int DIM, int R>
void attend(const T* const* q, T* const* out, const Pages<T>& keys, const Pages<T>& values, int64_t first, int64_t n,
            float* scores, float scale, float softcap, const float* sinks) {
    constexpr int C = DIM / 16;
    vec query[R][C], mixed[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) query[r][c] = load16(q[r] + 16 * c) * scale, mixed[r][c] = vec{};
    Walk<T> key_at(keys, first), value_at(values, first);
    for (int64_t t = first; t < n; t++, ++key_at) {
        const T* key = *key_at;
        vec dot[R] = {};
        for (int c = 0; c < C; c++) {
            const vec k = load16(key + 16 * c);
            for (int r = 0; r < R; r++) dot[r] += query[r][c] * k;
        }
        for (int r = 0; r < R; r++) {
            const float score = sum16(dot[r]);
            scores[r * n + t] = softcap > 0 ? softcap * std::tanh(score / softcap) : score;
        }
    }
    for (int r = 0; r < R; r++) {
        float* row = scores + r * n;
        float top = sinks ? sinks[r] : -INFINITY, total = 0;
#pragma omp simd reduction(max : top)
        for (int64_t t = first; t < n; t++) top = std::max(top, row[t]);
#pragma omp simd reduction(+ : total)
        for (int64_t t = first; t < n; t++) {
            row[t] = exp_negative(row[t] - top);
            total += row[t];
        }
        if (sinks) total += std::exp(sinks[r] - top);
        const float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t t = first; t < n; t++) row[t] *= inverse;
    }
    for (int64_t t = first; t < n; t++, ++value_at) {
        const T* value = *value_at;
        for (int c = 0; c < C; c++) {
            const vec v = load16(value + 16 * c);
            for (int r = 0; r < R; r++) mixed[r][c] += scores[r * n + t] * v;
        }
    }
    for (int r = 0; r < R; r++)
        for (int d = 0; d < DIM; d++) store(out[r] + d, mixed[r][d / 16][d % 16]);
}

// One new token per sequence: write its key and value into the cache, then attend over the sequence's pages.
// q [heads, B, DIM], k and v [kv_heads, B, DIM] with given strides over head and sequence; pages
// [pages, kv_heads, page_size, DIM]; table [B, table_width]; length counts the new token; out [B, heads, DIM].
template <typename T, int DIM>
void decode_attention(const T* q, const T* k, const T* v, T* k_pages, T* v_pages, const int32_t* table,
                      const int32_t* length, T* out, const int64_t* strides, int64_t B, int64_t heads,
                      int64_t kv_heads, int64_t page_size, int64_t table_width, float scale, int64_t window,
                      float softcap, const float* sinks) {
    const int64_t repeat = heads / kv_heads;
#pragma omp parallel
    {
        std::vector<float> scores;
        const int64_t stride = kv_heads * page_size * DIM;
#pragma omp for  // all before anybody attends: rows may be neighbours in one sequence
        for (int64_t b = 0; b < B; b++)
            for (int64_t g = 0; g < kv_heads; g++) {
                const int64_t last = length[b] - 1, page = table[b * table_width + last / page_size];
                const int64_t home = page * stride + (g * page_size + last % page_size) * DIM;
                memcpy(k_pages + home, k + g * strides[2] + b * strides[3], DIM * sizeof(T));
                memcpy(v_pages + home, v + g * strides[4] + b * strides[5], DIM * sizeof(T));
            }
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t b = 0; b < B; b++)
            for (int64_t g = 0; g < kv_heads; g++) {
                const int32_t* pages = table + b * table_width;
                const int64_t n = length[b], offset = g * page_size * DIM;
                const int64_t first = window > 0 && n > window ? n - window : 0;
                const Pages<T> keys{k_pages, pages, page_size, stride, offset, DIM};
                const Pages<T> values{v_pages, pages, page_size, stride, offset, DIM};
                if ((int64_t)scores.size() < 4 * n) scores.resize(4 * n);
                for (int64_t h = g * repeat; h < (g + 1) * repeat;) {  // up to four heads at a time
                    const int64_t left = (g + 1) * repeat - h;
                    const T* rows[4];
                    T* targets[4];
                    for (int64_t r = 0; r < std::min<int64_t>(left, 4); r++) {
                        rows[r] = q + (h + r) * strides[0] + b * strides[1];
                        targets[r] = out + (b * heads + h + r) * DIM;
                    }
                    const auto run = left >= 4   ? attend<T, DIM, 4>
                                     : left == 3 ? attend<T, DIM, 3>
                                     : left == 2 ? attend<T, DIM, 2>
                                                 : attend<T, DIM, 1>;
                    run(rows, targets, keys, values, first, n, scores.data(), scale, softcap, sinks ? sinks + h : nullptr);
                    h += std::min<int64_t>(left, 4);
                }
            }
    }
}

// Sample one token per row of logits [B, V] from softmax(logits / temperature) by inverting the distribution function
// at `uniform`, and report the log-probability. Block sums replace a cumulative sum over the vocabulary.
// inverse_temperature 0 means greedy; its log-prob is at temperature 1.
template <typename T>
void sample(const T* logits, const float* inverse_temperature, const double* uniform, int64_t* tokens, float* logprobs,
            int64_t B, int64_t V) {
    constexpr int64_t BLOCK = 256;
    const int64_t blocks = (V + BLOCK - 1) / BLOCK;
#pragma omp parallel
    {
        std::vector<float> sums(blocks);
#pragma omp for schedule(dynamic, 1)
        for (int64_t b = 0; b < B; b++) {
            const T* row = logits + b * V;
            const bool greedy = inverse_temperature[b] == 0;
            const float scale = greedy ? 1.0f : inverse_temperature[b];
            float top = -INFINITY;
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < V; i++) top = std::max(top, load(row + i));
            double total = 0;
            for (int64_t j = 0; j < blocks; j++) {
                float sum = 0;
                const int64_t end = std::min(V, (j + 1) * BLOCK);
#pragma omp simd reduction(+ : sum)
                for (int64_t i = j * BLOCK; i < end; i++) sum += exp_negative((load(row + i) - top) * scale);
                sums[j] = sum;
                total += sum;
            }
            int64_t chosen = 0;
            if (greedy) {
                while (chosen + 1 < V && load(row + chosen) != top) chosen++;
            } else {
                double left = uniform[b] * total;
                int64_t j = 0;
                while (j + 1 < blocks && left >= sums[j]) left -= sums[j++];
                chosen = j * BLOCK;
                const int64_t end = std::min(V, (j + 1) * BLOCK);
                for (;;) {  // rounding may leave a sliver after the last token of the block: it takes it
                    left -= exp_negative((load(row + chosen) - top) * scale);
                    if (left < 0 || chosen + 1 == end) break;
                    chosen++;
                }
            }
            tokens[b] = chosen;
            logprobs[b] = (load(row + chosen) - top) * scale - (float)std::log(total);
        }
    }
}

// Per row of logits [N, V]: log-prob of the target, log of the normaliser, entropy; all at the given temperature.
template <typename T>
void row_statistics(const T* logits, const int64_t* targets, float* logp, float* lse, float* entropy, float scale,
                    int64_t N, int64_t V) {
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t n = 0; n < N; n++) {
        const T* row = logits + n * V;
        float top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < V; i++) top = std::max(top, load(row + i));
        double total = 0, weighted = 0;
        for (int64_t begin = 0; begin < V; begin += 1024) {  // short float sums, long double ones
            const int64_t end = std::min(V, begin + 1024);
            float sum = 0, mix = 0;
#pragma omp simd reduction(+ : sum, mix)
            for (int64_t i = begin; i < end; i++) {
                // 0 times infinity is no number: what is impossible must add nothing to the entropy.
                const float x = std::max((load(row + i) - top) * scale, -87.0f), e = exp_negative(x);
                sum += e;
                mix += e * x;
            }
            total += sum;
            weighted += mix;
        }
        const float log_total = (float)std::log(total);
        lse[n] = top * scale + log_total;
        logp[n] = (load(row + targets[n]) - top) * scale - log_total;
        entropy[n] = log_total - (float)(weighted / total);
    }
}

// Overwrites logits with the gradient of  sum_n grad_logp[n] logp[n] + grad_entropy[n] entropy[n].
template <typename T>
void row_gradients(T* logits, const int64_t* targets, const float* lse, const float* entropy, const float* grad_logp,
                   const float* grad_entropy, float scale, int64_t N, int64_t V) {
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t n = 0; n < N; n++) {
        T* row = logits + n * V;
        const float g = grad_logp[n] * scale, h = grad_entropy ? grad_entropy[n] * scale : 0.0f;
        const float shift = lse[n], mean = entropy[n];
        const float target = exp_negative(std::min(0.0f, load(row + targets[n]) * scale - shift));
        const float log_target = std::max(load(row + targets[n]) * scale - shift, -87.0f);
#pragma omp simd
        for (int64_t i = 0; i < V; i++) {
            const float x = std::max(std::min(0.0f, load(row + i) * scale - shift), -87.0f);
            store(row + i, -exp_negative(x) * (g + h * (x + mean)));
        }
        store(row + targets[n], g - target * (g + h * (log_target + mean)));
    }
}

// out = weight * round(x / rms(x)), row by row, rounding where the modules round; keeps 1 / rms for the backward pass.
template <typename T>
void rms_norm(const T* x, const T* weight, T* out, float* inverse_rms, float eps, int64_t N, int64_t H) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const T* row = x + n * H;
        float square = 0;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < H; i++) square += load(row + i) * load(row + i);
        const float r = 1.0f / std::sqrt(square / H + eps);
        inverse_rms[n] = r;
        T* target = out + n * H;
#pragma omp simd
        for (int64_t i = 0; i < H; i++) {
            T scaled;
            store(&scaled, load(row + i) * r);
            store(target + i, load(weight + i) * load(&scaled));
        }
    }
}

// dx = r (g w - x r^2 mean(g w x)), plus what comes from elsewhere, if anything; dweight = sum over rows of g x r: one float sum per thread, added in thread order,
// so that the same number of threads gives the same bits.
template <typename T>
void rms_norm_backward(const T* grad, const T* x, const T* weight, const float* inverse_rms, const T* plus, T* dx,
                       float* dweight, int64_t N, int64_t H) {
    const int64_t threads = omp_get_max_threads();
    std::vector<float> partial(threads * H, 0.0f);
#pragma omp parallel
    {
        float* sums = partial.data() + omp_get_thread_num() * H;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            const T *g = grad + n * H, *row = x + n * H;
            const float r = inverse_rms[n];
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < H; i++) dot += load(g + i) * load(weight + i) * load(row + i);
            const float common = r * r * r * dot / H;
#pragma omp simd
            for (int64_t i = 0; i < H; i++) {
                const float gi = load(g + i), xi = load(row + i);
                const float other = plus ? load(plus + n * H + i) : 0.0f;
                store(dx + n * H + i, r * gi * load(weight + i) - common * xi + other);
                sums[i] += gi * xi * r;
            }
        }
    }
    for (int64_t t = 0; t < threads; t++)
        for (int64_t i = 0; i < H; i++) dweight[i] += partial[t * H + i];
}

// 1 / (1 + exp(-x)) from the exponential of a negative number.
inline float sigmoid(float x) {
    const float e = exp_negative(-std::fabs(x));
    return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

// out = round(silu(gate)) * up
template <typename T>
void swiglu(const T* gate, const T* up, T* out, int64_t N) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < N; i++) {
        T activated;
        store(&activated, load(gate + i) * sigmoid(load(gate + i)));
        store(out + i, load(&activated) * load(up + i));
    }
}

template <typename T>
void swiglu_backward(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t N) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < N; i++) {
        const float g = load(gate + i), s = sigmoid(g), d = load(grad + i);
        store(dup + i, d * g * s);
        store(dgate + i, d * load(up + i) * s * (1.0f + g * (1.0f - s)));
    }
}

// The gradients of gate and up take their places, and their gated product the place of its own gradient.
template <typename T>
void swiglu_again(T* grad, T* gate, T* up, int64_t N) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < N; i++) {
        const float g = load(gate + i), u = load(up + i), s = sigmoid(g), d = load(grad + i);
        T activated;
        store(&activated, g * s);
        store(grad + i, load(&activated) * u);
        store(up + i, d * g * s);
        store(gate + i, d * u * s * (1.0f + g * (1.0f - s)));
    }
}

// Rows of gate and up side by side, [N, 2 I], to their gated product [N, I].
template <typename T>
void gate_rows(const T* gate_up, T* out, int64_t N, int64_t I) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const T *gate = gate_up + 2 * n * I, *up = gate + I;
#pragma omp simd
        for (int64_t i = 0; i < I; i++) {
            T activated;
            store(&activated, load(gate + i) * sigmoid(load(gate + i)));
            store(out + n * I + i, load(&activated) * load(up + i));
        }
    }
}

// Of weight * product: the gradients of gate and up take their places, weight * product the place of grad, which is
// that of the weighted product, and dweight gets the one of the weight, a sum over a row that no other thread adds to.
template <typename T>
void gate_rows_again(T* grad, T* gate_up, const float* weight, float* dweight, int64_t N, int64_t I) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        T *gate = gate_up + 2 * n * I, *up = gate + I, *of = grad + n * I;
        const float w = weight[n];
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < I; i++) {
            const float g = load(gate + i), u = load(up + i), s = sigmoid(g), given = load(of + i), d = w * given;
            T activated, product;
            store(&activated, g * s);
            store(&product, load(&activated) * u);
            dot += given * load(&product);
            store(of + i, w * load(&product));
            store(up + i, d * g * s);
            store(gate + i, d * u * s * (1.0f + g * (1.0f - s)));
        }
        dweight[n] = dot;
    }
}

// As gpt-oss has it: gate and up in turn, gate at most `limit`, up within it, to (up + 1) * gate * sigmoid(alpha * gate).
template <typename T>
void limit_rows(const T* gate_up, T* out, int64_t N, int64_t I, float alpha, float limit) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const T* both = gate_up + 2 * n * I;
#pragma omp simd
        for (int64_t i = 0; i < I; i++) {
            const float g = std::min(load(both + 2 * i), limit);
            const float u = std::max(std::min(load(both + 2 * i + 1), limit), -limit);
            store(out + n * I + i, (u + 1.0f) * g * sigmoid(alpha * g));
        }
    }
}

// As gate_rows_again. What is beyond a limit does not learn.
template <typename T>
void limit_rows_again(T* grad, T* gate_up, const float* weight, float* dweight, int64_t N, int64_t I, float alpha,
                      float limit) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        T *both = gate_up + 2 * n * I, *of = grad + n * I;
        const float w = weight[n];
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < I; i++) {
            const float gate = load(both + 2 * i), up = load(both + 2 * i + 1), given = load(of + i), d = w * given;
            const float g = std::min(gate, limit), u = std::max(std::min(up, limit), -limit), s = sigmoid(alpha * g);
            T product;
            store(&product, (u + 1.0f) * g * s);
            dot += given * load(&product);
            store(of + i, w * load(&product));
            store(both + 2 * i, gate <= limit ? d * (u + 1.0f) * s * (1.0f + alpha * g * (1.0f - s)) : 0.0f);
            store(both + 2 * i + 1, up >= -limit && up <= limit ? d * g * s : 0.0f);
        }
        dweight[n] = dot;
    }
}

// total[place[n]] += weight[n] * rows[n], in the order of the rows; weight may be null, for ones. Threads share columns,
// so that rows of one place do not meet.
template <typename T>
void add_rows(float* total, const int64_t* place, const T* rows, const float* weight, int64_t N, int64_t H) {
    constexpr int64_t BLOCK = 64;
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < H; begin += BLOCK) {
        const int64_t end = std::min(begin + BLOCK, H);
        for (int64_t n = 0; n < N; n++) {
            float* into = total + place[n] * H;
            const float w = weight ? weight[n] : 1.0f;
#pragma omp simd
            for (int64_t i = begin; i < end; i++) into[i] += w * load(rows + n * H + i);
        }
    }
}

// Sixteen floats rounded as they would be in memory.
inline void store16(float* p, vec x) { memcpy(p, &x, sizeof x); }
inline void store16(bf16* p, vec x) {  // round to nearest even
    const full_bits bits = (full_bits)x;
    const half_bits h = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, half_bits);
    memcpy(p, &h, sizeof h);
}
template <typename T>
inline vec rounded16(vec x) {
    T memory[16];
    store16(memory, x);
    return load16(memory);
}

// Rotary of one head, in place, rounding where the modules round; back: the gradient of that.
template <typename T>
inline void rotate_head(T* head, const T* cos, const T* sin, int64_t dim, bool back) {
    const int64_t half = dim / 2;
    const T *sin_b = back ? sin + half : sin, *sin_a = back ? sin : sin + half;
    const float sign = back ? 1.0f : -1.0f;
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const vec a = load16(head + i), b = load16(head + half + i);
        const vec p = rounded16<T>(a * load16(cos + i)), q = rounded16<T>(b * load16(sin_b + i) * sign);
        const vec r = rounded16<T>(b * load16(cos + half + i)), s = rounded16<T>(a * load16(sin_a + i) * -sign);
        store16(head + i, p + q);
        store16(head + half + i, r + s);
    }
    for (; i < half; i++) {
        const float a = load(head + i), b = load(head + half + i);
        T p, q, r, s;
        store(&p, a * load(cos + i));
        store(&q, b * load(sin_b + i) * sign);
        store(&r, b * load(cos + half + i));
        store(&s, a * load(sin_a + i) * -sign);
        store(head + i, load(&p) + load(&q));
        store(head + half + i, load(&r) + load(&s));
    }
}

// The first `heads` heads of each row.
template <typename T>
void rotate_rows(T* x, int64_t stride, const T* cos, const T* sin, int64_t N, int64_t heads, int64_t dim, bool back) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < heads; h++)
            rotate_head(x + n * stride + h * dim, cos + n * dim, sin + n * dim, dim, back);
}

template <typename T>
void accumulate(float* total, const T* part, int64_t N) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < N; i++) total[i] += load(part + i);
}

// 32 random bits of a place and an update, as in kitae/kernels/adamw.py.
inline uint32_t chance(uint32_t place, uint32_t salt) {
    uint32_t x = place * 0x9E3779B1u ^ salt;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}
inline void keep(float* p, float x, uint32_t) { *p = x; }
inline void keep(bf16* p, float x, uint32_t bits16) {  // up or down, right on average
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = (bf16)((bits + bits16) >> 16);
}

// Where fp32 weights lie: as they are, or as bf16 and what that lacks of them, as in kitae/kernels/masters.py.
struct Whole {
    float* weight;
    float load(int64_t i) const { return weight[i]; }
    void store(int64_t i, float x) const { weight[i] = x; }
};
struct Split {
    bf16* weight;
    int16_t* rest;
    float load(int64_t i) const {
        const uint32_t bits = ((uint32_t)weight[i] << 16) + (uint32_t)(int32_t)rest[i];
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    void store(int64_t i, float x) const {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        weight[i] = (bf16)((bits + 0x8000u) >> 16);
        rest[i] = (int16_t)bits;  // the upper half takes the carry of rounding, so that the lower one is signed
    }
};

// A step of AdamW with the gradient times `scale`; moments of type T.
template <typename W, typename T>
void adamw(W weights, const float* grad, T* mean, T* square, float scale, float rate, float beta1, float beta2,
           float eps, float decay, float correct1, float correct2, uint32_t salt, int64_t N) {
    const float speed = rate / correct1, inverse = 1.0f / correct2;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < N; i++) {
        const float g = grad[i] * scale;
        float m = load(mean + i), v = load(square + i);
        m += (1.0f - beta1) * (g - m);
        v = beta2 * v + (1.0f - beta2) * g * g;
        const float p = weights.load(i) * decay - speed * m / (std::sqrt(v) * inverse + eps);
        const uint32_t bits = chance((uint32_t)i, salt);
        keep(mean + i, m, bits & 0xffff);
        keep(square + i, v, bits >> 16);
        weights.store(i, p);
    }
}

// Scores [N, fold * L, S] become probabilities in place. Row (h, i) sees keys j <= i + S - L, and only the last
// `window` of them if window > 0.
template <typename T>
void causal_softmax(T* scores, float scale, int64_t N, int64_t fold, int64_t L, int64_t S, int64_t window) {
#pragma omp parallel
    {
        std::vector<float> row(S);
        float* x = row.data();
#pragma omp for schedule(static)
        for (int64_t n = 0; n < N * fold * L; n++) {
            T* target = scores + n * S;
            const int64_t end = n % L + S - L + 1, begin = window > 0 && end > window ? end - window : 0;
            float top = -INFINITY, total = 0;
#pragma omp simd reduction(max : top)
            for (int64_t j = begin; j < end; j++) top = std::max(top, load(target + j));
#pragma omp simd reduction(+ : total)
            for (int64_t j = begin; j < end; j++) {
                x[j] = exp_negative((load(target + j) - top) * scale);
                total += x[j];
            }
            const float inverse = 1.0f / total;
            for (int64_t j = 0; j < begin; j++) store(target + j, 0.0f);
#pragma omp simd
            for (int64_t j = begin; j < end; j++) store(target + j, x[j] * inverse);
            for (int64_t j = end; j < S; j++) store(target + j, 0.0f);
        }
    }
}

// Gradient of the scores, written over the gradient of the probabilities: p (dp - delta) scale.
template <typename T>
void softmax_backward(const T* probs, T* dprobs, const float* delta, float scale, int64_t rows, int64_t S) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        const T* p = probs + n * S;
        T* d = dprobs + n * S;
        const float shift = delta[n];
#pragma omp simd
        for (int64_t j = 0; j < S; j++) store(d + j, load(p + j) * (load(d + j) - shift) * scale);
    }
}

}  // namespace

#include "decoder.h"

#include "spans.h"

#include "amx.h"

#define EXPORT(SUFFIX, T)                                                                                               \
    void decode_attention_##SUFFIX(const T* q, const T* k, const T* v, T* kp, T* vp, const int32_t* table, const int32_t* len,   \
                         T* out, const int64_t* strides, int64_t B, int64_t heads, int64_t kv_heads, int64_t dim,      \
                         int64_t page_size, int64_t width, float scale, int64_t window, float softcap,                 \
                         const float* sinks) {                                                                         \
        const auto run = dim == 16    ? decode_attention<T, 16>                                                        \
                         : dim == 32  ? decode_attention<T, 32>                                                        \
                         : dim == 64  ? decode_attention<T, 64>                                                        \
                         : dim == 80  ? decode_attention<T, 80>                                                        \
                         : dim == 96  ? decode_attention<T, 96>                                                        \
                         : dim == 128 ? decode_attention<T, 128>                                                       \
                                      : decode_attention<T, 256>;                                                      \
        run(q, k, v, kp, vp, table, len, out, strides, B, heads, kv_heads, page_size, width, scale, window, softcap,   \
            sinks);                                                                                                    \
    }                                                                                                                  \
    void sample_##SUFFIX(const T* logits, const float* inverse_temperature, const double* uniform, int64_t* tokens,    \
                         float* logprobs, int64_t B, int64_t V) {                                                      \
        sample<T>(logits, inverse_temperature, uniform, tokens, logprobs, B, V);                                       \
    }                                                                                                                  \
    void row_statistics_##SUFFIX(const T* logits, const int64_t* targets, float* logp, float* lse, float* entropy,     \
                                 float scale, int64_t N, int64_t V) {                                                  \
        row_statistics<T>(logits, targets, logp, lse, entropy, scale, N, V);                                           \
    }                                                                                                                  \
    void row_gradients_##SUFFIX(T* logits, const int64_t* targets, const float* lse, const float* entropy,             \
                                const float* grad_logp, const float* grad_entropy, float scale, int64_t N,             \
                                int64_t V) {                                                                           \
        row_gradients<T>(logits, targets, lse, entropy, grad_logp, grad_entropy, scale, N, V);                         \
    }                                                                                                                  \
    void rms_norm_##SUFFIX(const T* x, const T* weight, T* out, float* inverse_rms, float eps, int64_t N, int64_t H) { \
        rms_norm<T>(x, weight, out, inverse_rms, eps, N, H);                                                           \
    }                                                                                                                  \
    void rms_norm_backward_##SUFFIX(const T* grad, const T* x, const T* weight, const float* inverse_rms,              \
                                    const T* plus, T* dx, float* dweight, int64_t N, int64_t H) {                      \
        rms_norm_backward<T>(grad, x, weight, inverse_rms, plus, dx, dweight, N, H);                                   \
    }                                                                                                                  \
    void rotate_##SUFFIX(T* x, int64_t stride, const T* cos, const T* sin, int64_t N, int64_t heads, int64_t dim,      \
                         int64_t back) {                                                                               \
        rotate_rows<T>(x, stride, cos, sin, N, heads, dim, back);                                                      \
    }                                                                                                                  \
    void swiglu_again_##SUFFIX(T* grad, T* gate, T* up, int64_t N) { swiglu_again<T>(grad, gate, up, N); }             \
    void gate_rows_##SUFFIX(const T* gate_up, T* out, int64_t N, int64_t I) { gate_rows<T>(gate_up, out, N, I); }      \
    void gate_rows_again_##SUFFIX(T* grad, T* gate_up, const float* weight, float* dweight, int64_t N, int64_t I) {    \
        gate_rows_again<T>(grad, gate_up, weight, dweight, N, I);                                                      \
    }                                                                                                                  \
    void limit_rows_##SUFFIX(const T* gate_up, T* out, int64_t N, int64_t I, float alpha, float limit) {               \
        limit_rows<T>(gate_up, out, N, I, alpha, limit);                                                               \
    }                                                                                                                  \
    void limit_rows_again_##SUFFIX(T* grad, T* gate_up, const float* weight, float* dweight, int64_t N, int64_t I,     \
                                   float alpha, float limit) {                                                         \
        limit_rows_again<T>(grad, gate_up, weight, dweight, N, I, alpha, limit);                                       \
    }                                                                                                                  \
    void add_rows_##SUFFIX(float* total, const int64_t* place, const T* rows, const float* weight, int64_t N,          \
                           int64_t H) {                                                                                \
        add_rows<T>(total, place, rows, weight, N, H);                                                                 \
    }                                                                                                                  \
    void accumulate_##SUFFIX(float* total, const T* part, int64_t N) { accumulate<T>(total, part, N); }                \
    void adamw_##SUFFIX(void* weight, int16_t* rest, const float* grad, T* mean, T* square, float scale, float rate,   \
                        float beta1, float beta2, float eps, float decay, float correct1, float correct2, int64_t salt,\
                        int64_t N) {                                                                                   \
        if (rest)                                                                                                      \
            adamw(Split{(bf16*)weight, rest}, grad, mean, square, scale, rate, beta1, beta2, eps, decay, correct1,     \
                  correct2, (uint32_t)salt, N);                                                                        \
        else                                                                                                           \
            adamw(Whole{(float*)weight}, grad, mean, square, scale, rate, beta1, beta2, eps, decay, correct1,          \
                  correct2, (uint32_t)salt, N);                                                                        \
    }                                                                                                                  \
    void swiglu_##SUFFIX(const T* gate, const T* up, T* out, int64_t N) { swiglu<T>(gate, up, out, N); }               \
    void swiglu_backward_##SUFFIX(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t N) {            \
        swiglu_backward<T>(grad, gate, up, dgate, dup, N);                                                             \
    }                                                                                                                  \
    void causal_softmax_##SUFFIX(T* scores, float scale, int64_t N, int64_t fold, int64_t L, int64_t S,                \
                                 int64_t window) {                                                                     \
        causal_softmax<T>(scores, scale, N, fold, L, S, window);                                                       \
    }                                                                                                                  \
    void softmax_backward_##SUFFIX(const T* probs, T* dprobs, const float* delta, float scale, int64_t rows,           \
                                   int64_t S) {                                                                        \
        softmax_backward<T>(probs, dprobs, delta, scale, rows, S);                                                     \
    }

extern "C" {
EXPORT(f32, float)
EXPORT(bf16, bf16)
}

// Exact mode: attention whose value at a query depends on nothing but the query and the keys before it.

namespace {

// Run i, four numbers (row, count, position, begin): query rows [row, row + count) stand at positions [position, ...) of
// a sequence whose key t is slot t % page_size of page table[begin + t / page_size]. Strides in elements: q over head and
// row; keys and values over page, head and slot. out [rows, heads, DIM].
template <typename T, int DIM>
void exact_attention(const T* q, const T* k, const T* v, const int64_t* runs, const int32_t* table, T* out,
                     const int64_t* strides, int64_t run_count, int64_t heads, int64_t kv_heads, int64_t page_size,
                     float scale, int64_t window, float softcap, const float* sinks) {
    std::vector<std::pair<int64_t, int64_t>> queries;  // (run, place in it)
    int64_t longest = 0;
    for (int64_t i = 0; i < run_count; i++) {
        for (int64_t j = 0; j < runs[4 * i + 1]; j++) queries.emplace_back(i, j);
        longest = std::max(longest, runs[4 * i + 2] + runs[4 * i + 1]);
    }
    const int64_t repeat = heads / kv_heads;
#pragma omp parallel
    {
        // Aligned, so that no peeled loop can begin elsewhere for the same query.
        std::vector<float> memory(4 * longest + 16);
        float* scores = (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
#pragma omp for collapse(2) schedule(dynamic, 8)
        for (int64_t i = 0; i < (int64_t)queries.size(); i++)
            for (int64_t g = 0; g < kv_heads; g++) {
                const int64_t* run = runs + 4 * queries[i].first;
                const int64_t row = run[0] + queries[i].second, n = run[2] + queries[i].second + 1;
                const int64_t first = window > 0 && n > window ? n - window : 0;
                const Pages<T> keys{k, table + run[3], page_size, strides[2], g * strides[3], strides[4]};
                const Pages<T> values{v, table + run[3], page_size, strides[5], g * strides[6], strides[7]};
                for (int64_t h = g * repeat; h < (g + 1) * repeat;) {
                    const int64_t left = std::min<int64_t>((g + 1) * repeat - h, 4);
                    const T* rows[4];
                    T* targets[4];
                    for (int64_t r = 0; r < left; r++) {
                        rows[r] = q + (h + r) * strides[0] + row * strides[1];
                        targets[r] = out + (row * heads + h + r) * DIM;
                    }
                    const auto attend_heads = left == 4   ? attend<T, DIM, 4>
                                              : left == 3 ? attend<T, DIM, 3>
                                              : left == 2 ? attend<T, DIM, 2>
                                                          : attend<T, DIM, 1>;
                    attend_heads(rows, targets, keys, values, first, n, scores, scale, softcap, sinks ? sinks + h : nullptr);
                    h += left;
                }
            }
    }
}

}  // namespace

#define EXPORT_EXACT(SUFFIX, T)                                                                                         \
    void exact_attention_##SUFFIX(const T* q, const T* k, const T* v, const int64_t* runs, const int32_t* table, T* out, \
                                  const int64_t* strides, int64_t run_count, int64_t heads, int64_t kv_heads,          \
                                  int64_t dim, int64_t page_size, float scale, int64_t window, float softcap,          \
                                  const float* sinks) {                                                                \
        const auto run = dim == 16    ? exact_attention<T, 16>                                                         \
                         : dim == 32  ? exact_attention<T, 32>                                                         \
                         : dim == 64  ? exact_attention<T, 64>                                                         \
                         : dim == 80  ? exact_attention<T, 80>                                                         \
                         : dim == 96  ? exact_attention<T, 96>                                                         \
                         : dim == 128 ? exact_attention<T, 128>                                                        \
                                      : exact_attention<T, 256>;                                                       \
        run(q, k, v, runs, table, out, strides, run_count, heads, kv_heads, page_size, scale, window, softcap, sinks); \
    }

extern "C" {
EXPORT_EXACT(f32, float)
EXPORT_EXACT(bf16, bf16)
}
