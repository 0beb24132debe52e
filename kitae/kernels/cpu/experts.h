// Mixtures of experts in the decoder. Included by decoder.h.
//
// A pair is a token and one of its experts, number t * top_k + k. The rows of the pairs of an expert are gathered into a
// left operand of their own, and its weights are read once for all of them. What each pair gives is kept, times its
// gate, and a token adds up its own in the order of k: so a row depends neither on who else chose its experts nor on the
// threads. Experts that nobody chose cost nothing. All functions run within a parallel region.

namespace {

// The largest logits of a row, of equal ones the first, and their shares of the softmax. Logits are written over. One
// that is no number makes all shares so, and counts as the lowest: no expert is taken twice.
template <typename T>
void choose(T* logits, const ExpertMix<T>& m, int32_t* chosen, float* gates) {
    constexpr float LOWEST = -3.0e38f;
    float top = LOWEST, total = 0, of_chosen = 0;
    for (int64_t e = 0; e < m.experts; e++) top = std::max(top, load(logits + e));
    for (int64_t e = 0; e < m.experts; e++) {
        const float logit = load(logits + e);
        total += std::exp(logit - top);
        store(logits + e, logit > LOWEST ? logit : LOWEST);
    }
    for (int64_t k = 0; k < m.top_k; k++) {
        int64_t best = 0;
        for (int64_t e = 1; e < m.experts; e++)
            if (load(logits + e) > load(logits + best)) best = e;
        chosen[k] = (int32_t)best;
        gates[k] = std::exp(load(logits + best) - top) / total;
        of_chosen += gates[k];
        store(logits + best, -INFINITY);
    }
    if (m.renormalise)
        for (int64_t k = 0; k < m.top_k; k++) gates[k] /= of_chosen;
}

// Where the rows of each expert are, and which pair each of them is; -1 where a block has rows to spare.
template <typename Unit, typename T = typename Unit::T>
void group_pairs(const Decoder<T>& d, const ExpertMix<T>& m, const int32_t* chosen, int64_t pairs) {
    std::fill(d.groups, d.groups + m.experts, Group{0, 0});
    for (int64_t p = 0; p < pairs; p++) d.groups[chosen[p]].count++;
    int64_t first = 0;
    for (Group* group = d.groups; group < d.groups + m.experts; group++) {
        group->first = first;
        if (group->count) first += tiles(group->count, Unit::height(group->count)) * Unit::height(group->count);
        group->count = 0;
    }
    d.groups[m.experts] = {0, first};
    std::fill(d.pair_of, d.pair_of + first, -1);
    for (int64_t p = 0; p < pairs; p++) {
        Group& group = d.groups[chosen[p]];
        d.pair_of[group.first + group.count++] = (int32_t)p;
    }
}

// What the rows of an expert are in an operand [rows, K] of all.
template <typename Unit, typename T = typename Unit::T>
Blocked<T> part_of(T* all, const Group& group, int64_t K) {
    return {all + group.first * K, K, Unit::height(group.count)};
}

template <typename Unit, typename T = typename Unit::T>
void gather(const Decoder<T>& d, const ExpertMix<T>& m, const int32_t* chosen, const Blocked<T>& from) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < d.groups[m.experts].first; row++) {
        const int64_t pair = d.pair_of[row];
        if (pair < 0) continue;
        const Group& group = d.groups[chosen[pair]];
        const Blocked<T> to = part_of<Unit>(d.gathered, group, from.K);
        for (int64_t i = 0; i < from.K; i += Blocked<T>::LINE)
            memcpy(to.at(row - group.first, i), from.at(pair / m.top_k, i), 64);
    }
}

// As PutGated, as gpt-oss has it: biases, limits, and (up + 1) * gate * sigmoid(alpha * gate).
template <typename Unit>
struct PutLimited {
    Blocked<typename Unit::T> out;
    const typename Unit::T *gate_bias, *up_bias;
    float alpha, limit;
    void operator()(const float* block, int64_t row, int64_t rows, int64_t column, int64_t) const {
        const part shift = Unit::load(gate_bias + column / 2), up_shift = Unit::load(up_bias + column / 2);
        const part most = part{} + limit;
        for (int64_t i = 0; i < rows; i++) {
            part gate = Unit::rounded(Unit::rounded(load_part(block + i * PANEL)) + shift);
            part up = Unit::rounded(Unit::rounded(load_part(block + i * PANEL + WIDTH)) + up_shift);
            gate = gate > most ? most : gate;
            up = up > most ? most : up;
            up = Unit::rounded((up < -most ? -most : up) + 1.0f);
            const part share = Unit::rounded(1.0f / (1.0f + exp_of(bounded(-Unit::rounded(gate * alpha)))));
            Unit::put(out.at(row + i, column / 2), up * Unit::rounded(gate * share));
        }
    }
};

// out [pair] = round(round(block + bias) * gate of the pair); the width is a multiple of 16.
template <typename Unit>
struct PutShares {
    typedef typename Unit::T T;
    T* out;
    int64_t width;
    const T* bias;
    const int32_t* pair_of;
    const float* gates;
    void operator()(const float* block, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
        for (int64_t half = 0; half < columns; half += WIDTH) {
            const part shift = bias ? Unit::load(bias + column + half) : part{};
            for (int64_t i = 0; i < rows; i++) {
                const int64_t pair = pair_of[row + i];
                const part sum = Unit::rounded(load_part(block + i * PANEL + half));
                Unit::put(out + pair * width + column + half, Unit::rounded(sum + shift) * gates[pair]);
            }
        }
    }
};

// x += what the pairs of each row give together, or its norm.
template <typename Unit, typename T = typename Unit::T>
void add_pairs(const Decoder<T>& d, const Layer<T>& l, const T* pairs, int64_t top_k, int64_t rows) {
    const float factor = (float)d.factor;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = t * d.hidden; i < (t + 1) * d.hidden; i += WIDTH) {
            const T* first = pairs + t * (top_k - 1) * d.hidden + i;
            part sum = part{};
            for (int64_t k = 0; k < top_k; k++) sum += Unit::load(first + k * d.hidden);
            sum = Unit::rounded(sum);
            if (l.after_mlp)
                Unit::put(d.added + i, sum);
            else
                Unit::put(d.x + i, Unit::load(d.x + i) + (factor == 1.0f ? sum : Unit::rounded(sum * factor)));
        }
    if (l.after_mlp)
        add_normed_rows<Unit>(d.x, d.added, l.after_mlp, (float)l.eps_after_mlp, l.rule, factor, rows, d.hidden);
}

// The second half of a layer that mixes experts, from the norm of x.
template <typename Unit, typename T = typename Unit::T>
void add_experts(const Decoder<T>& d, const Layer<T>& l, const ExpertMix<T>& m, const Blocked<T>& normed, int64_t rows) {
    int32_t* chosen = d.chosen + m.number * rows * m.top_k;
    product<Unit>(normed, m.router, rows, m.experts, PutRows<Unit>{d.logits, m.experts, m.router_bias});
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows; t++)
        choose(d.logits + t * m.experts, m, chosen + t * m.top_k, d.gates + t * m.top_k);
#pragma omp single
    group_pairs<Unit>(d, m, chosen, rows * m.top_k);
    gather<Unit>(d, m, chosen, normed);
    const auto each = [&](const auto& begin) {
        for (int64_t e = 0; e < m.experts; e++)
            if (d.groups[e].count) begin(e, d.groups[e]);
#pragma omp barrier
    };
    each([&](int64_t e, const Group& group) {
        const Blocked<T> left = part_of<Unit>(d.gathered, group, d.hidden), out = part_of<Unit>(d.gated, group, l.inner);
        const T* right = l.gate_up + e * l.gate_up_step;
        if (m.gate_up_bias) {
            const T* bias = m.gate_up_bias + e * 2 * l.inner;
            const PutLimited<Unit> put{out, bias, bias + l.inner, (float)m.alpha, (float)m.limit};
            Unit::begin_product(left, right, group.count, 2 * l.inner, put);
        } else {
            Unit::begin_product(left, right, group.count, 2 * l.inner, PutGated<Unit>{out, l.gelu != 0});
        }
    });
    T* pairs = d.gathered;  // which nobody reads any more
    each([&](int64_t e, const Group& group) {
        const T* bias = m.down_bias ? m.down_bias + e * d.hidden : nullptr;
        const PutShares<Unit> put{pairs, d.hidden, bias, d.pair_of + group.first, d.gates};
        Unit::begin_product(part_of<Unit>(d.gated, group, l.inner), l.down + e * l.down_step, group.count, d.hidden, put);
    });
    add_pairs<Unit>(d, l, pairs, m.top_k, rows);
}

}  // namespace
