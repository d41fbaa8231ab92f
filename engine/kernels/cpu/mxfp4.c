/* MXFP4 quantise-dequantise (QDQ) on a CPU, equal to engine/formats bit for bit.
 *
 * The arithmetic is that of engine/formats: scale.py (integer bump), e2m1.py (rounding), philox.py (noise), hadamard.py
 * (order of the butterflies). Loops run over arrays of a constant length and compare magnitudes as integers, so that every
 * compiler turns them into vector code; -ffp-contract=off keeps it from fusing multiplications and additions.
 *
 * Work is cut into panels of 32 quantised values x LANES independent blocks:
 *   rows    x is [n, 32]: a panel is LANES blocks, read transposed when there is a Hadamard transform;
 *   columns x is [n, 32, inner]: a panel is LANES neighbouring columns; for 32x32 tiles blocks of 32 columns share amax.
 */
#include <stdint.h>
#include <string.h>

#define BLOCK 32
#define LANES 32
#define LIMIT(bf16) ((bf16) ? 0x7F7F0000 : 0x7F7FFFFF) /* bits of the largest finite value */
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *x;
    void *out;
    int64_t outer;          /* groups of 32 along the quantised axis */
    int64_t inner;          /* values between two neighbours along it; 1 for rows */
    int32_t in_bf16, out_bf16;
    int32_t bump;           /* added to the bits of amax, target exponent included */
    int32_t tiled;          /* 32x32 tiles */
    int32_t sr, clip;
    uint32_t key_low, key_high;
    uint64_t first_element; /* index of x's first value in the logical operand, for the noise */
    int32_t stages;         /* Hadamard stages, 0 for none */
    const int32_t *permutation; /* [stages, 32] */
    const float *factors;       /* [stages, 32], +-1/sqrt(32) */
} Job;

INLINE uint32_t bits_of(float value) { uint32_t b; memcpy(&b, &value, 4); return b; }
INLINE float float_of(uint32_t b) { float value; memcpy(&value, &b, 4); return value; }
INLINE int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

INLINE void load(float *to, const void *x, int64_t at, int n, int bf16) {
    if (bf16) {
        const uint16_t *from = (const uint16_t *)x + at;
        for (int i = 0; i < n; i++) to[i] = float_of((uint32_t)from[i] << 16);
    } else {
        memcpy(to, (const float *)x + at, (size_t)n * 4);
    }
}

/* Values are exact in bfloat16 unless clipped; NaN is canonical, so its upper half is a NaN too. */
INLINE void store(void *out, int64_t at, const float *from, int n, int bf16, int exact) {
    if (bf16) {
        uint16_t *to = (uint16_t *)out + at;
        if (exact) {
            for (int i = 0; i < n; i++) to[i] = (uint16_t)(bits_of(from[i]) >> 16);
        } else {
            for (int i = 0; i < n; i++) {
                uint32_t b = bits_of(from[i]);
                uint32_t nearest = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
                to[i] = (uint16_t)(from[i] != from[i] ? b >> 16 : nearest);
            }
        }
    } else {
        memcpy((float *)out + at, from, (size_t)n * 4);
    }
}

/* Philox-4x32-7 of the counters first .. first + 7 (engine/formats/philox.py): 64 lanes of 16 bits. */
INLINE void philox8(uint64_t first, uint32_t k0, uint32_t k1, uint16_t *lanes) {
    uint32_t c0[8], c1[8], c2[8], c3[8];
    for (int i = 0; i < 8; i++) {
        c0[i] = (uint32_t)(first + (uint64_t)i);
        c1[i] = (uint32_t)((first + (uint64_t)i) >> 32);
        c2[i] = c3[i] = 0;
    }
    for (int round = 0; round < 7; round++) {
        for (int i = 0; i < 8; i++) {
            uint64_t p0 = (uint64_t)c0[i] * 0xD2511F53u, p1 = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)p1;
            c3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    uint32_t words[32];
    for (int i = 0; i < 8; i++) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
    memcpy(lanes, words, sizeof words); /* little endian: a word is its low lane, then its high one */
}

/* The noise of the elements at .. at + n - 1; room for n + 72 lanes. Returns where the first one lies. */
INLINE const uint16_t *noise(const Job *job, uint64_t at, int n, uint16_t *room) {
    uint64_t counter = at / 8;
    int skip = (int)(at % 8);
    for (int done = 0; done < n + skip; done += 64, counter += 8) philox8(counter, job->key_low, job->key_high, room + done);
    return room + skip;
}

#define ONE 0x3F800000
#define SIX 0x40C00000
#define MAGNITUDE 0x7FFFFFFFu
#define SIGN 0x80000000u

/* One value over its scale to E2M1: round to nearest, ties to even (e2m1.round_nearest_). Never NaN. */
INLINE float nearest(float q) {
    uint32_t b = bits_of(q), m = b & MAGNITUDE;
    float spacing = float_of((uint32_t)max_i32((int32_t)(m & 0x7F800000u), ONE)) * 6291456.0f; /* 1.5 * 2^22 */
    float rounded = (float_of(m) + spacing) - spacing;
    return float_of((uint32_t)min_i32((int32_t)bits_of(rounded), SIX) | (b & SIGN));
}

/* The same with stochastic rounding on 16 noise bits (e2m1.round_stochastic_). */
INLINE float stochastic(float q, uint16_t lane) {
    uint32_t b = bits_of(q);
    int32_t a = min_i32((int32_t)(b & MAGNITUDE), SIX), centred = ((int32_t)lane << 6) | 32;
    /* Below 1: ceil(2a - (r + 1/2) / 2^16), which is 0, 1 or 2. */
    float distance = (float)centred * -2.384185791015625e-7f + 2.0f * float_of((uint32_t)min_i32(a, ONE)); /* 2^-22 */
    int32_t t = (int32_t)bits_of(distance), below = (t > 0) + (t > ONE);
    uint32_t above = ((uint32_t)max_i32(a, ONE) + (uint32_t)centred) & 0xFFC00000u;
    float rounded = (float_of(above) - 1.0f) + 0.5f * (float)below;
    return float_of(bits_of(rounded) | (b & SIGN));
}

typedef struct { float reciprocal, scale; } Scale;

INLINE int32_t code_of(int32_t amax_bits, int32_t bump) {
    int32_t code = min_i32(max_i32((amax_bits + bump) >> 23, 0), 252);
    return amax_bits >= 0x7F800000 ? 255 : code;
}

/* 2^(127 - S) and 2^(S - 127); a non-finite block has the scale NaN. */
INLINE Scale scale_of(int32_t code) {
    Scale s;
    s.reciprocal = float_of((uint32_t)(254 - min_i32(code, 252)) << 23);
    s.scale = float_of(code == 255 ? 0x7FC00000u : code == 0 ? 0x00400000u : (uint32_t)code << 23);
    return s;
}

/* v becomes its rounded value; a NaN scale makes NaN of whatever it multiplies. */
INLINE void qdq_lanes(float *restrict v, const float *restrict reciprocal, const float *restrict scale,
                      const uint16_t *restrict lanes, int n, int sr, int clip, int32_t limit) {
    for (int i = 0; i < n; i++) {
        float q = (clip ? v[i] * 0.75f : v[i]) * reciprocal[i];
        float value = (sr ? stochastic(q, lanes[i]) : nearest(q)) * scale[i];
        if (clip) {
            uint32_t b = bits_of(value * 1.33333337306976318359375f); /* fp32(4/3) */
            float capped = float_of((uint32_t)min_i32((int32_t)(b & MAGNITUDE), limit) | (b & SIGN));
            value = capped * (scale[i] * 0.0f + 1.0f); /* 1, or NaN again */
        }
        v[i] = value;
    }
}

INLINE void butterflies(float (*v)[LANES]) {
    for (int stride = 1; stride < BLOCK; stride *= 2) {
        for (int base = 0; base < BLOCK; base += 2 * stride)
            for (int j = base; j < base + stride; j++)
                for (int c = 0; c < LANES; c++) {
                    float a = v[j][c], b = v[j + stride][c];
                    v[j][c] = a + b;
                    v[j + stride][c] = a - b;
                }
    }
}

/* y[p(i)] = d[i] sum_j S[i, j] x[p(j)] / sqrt(32), stage after stage, on LANES columns at once. */
INLINE void hadamard(const Job *job, float (*v)[LANES], float (*w)[LANES]) {
    for (int stage = 0; stage < job->stages; stage++) {
        const int32_t *p = job->permutation + stage * BLOCK;
        const float *d = job->factors + stage * BLOCK;
        for (int j = 0; j < BLOCK; j++) memcpy(w[j], v[p[j]], sizeof w[j]);
        butterflies(w);
        for (int j = 0; j < BLOCK; j++)
            for (int c = 0; c < LANES; c++) v[p[j]][c] = w[j][c] * d[j];
    }
}

/* Rows without a transform: block after block. */
INLINE int64_t rows_plain(const Job *job, int64_t from, int64_t to, int sr, int clip) {
    int64_t bad = 0;
    float v[4 * BLOCK], reciprocal[4 * BLOCK], scale[4 * BLOCK];
    uint16_t room[4 * BLOCK + 72];
    for (int64_t block = from; block < to; block += 4) {
        int blocks = to - block < 4 ? (int)(to - block) : 4;
        int64_t at = block * BLOCK;
        const uint16_t *lanes = room;
        if (sr) lanes = noise(job, job->first_element + (uint64_t)at, blocks * BLOCK, room);
        for (int k = 0; k < blocks; k++) {
            float *u = v + k * BLOCK;
            load(u, job->x, at + k * BLOCK, BLOCK, job->in_bf16);
            int32_t amax = 0;
            for (int i = 0; i < BLOCK; i++) amax = max_i32(amax, (int32_t)(bits_of(u[i]) & 0x7FFFFFFFu));
            int32_t code = code_of(amax, job->bump);
            bad += code == 255;
            Scale s = scale_of(code);
            for (int i = 0; i < BLOCK; i++) reciprocal[k * BLOCK + i] = s.reciprocal, scale[k * BLOCK + i] = s.scale;
            qdq_lanes(u, reciprocal + k * BLOCK, scale + k * BLOCK, lanes + k * BLOCK, BLOCK, sr, clip, LIMIT(job->out_bf16));
            store(job->out, at + k * BLOCK, u, BLOCK, job->out_bf16, !clip);
        }
    }
    return bad;
}

/* Rows with a transform: LANES blocks at a time, transposed. */
INLINE int64_t rows_hadamard(const Job *job, int64_t from, int64_t to, int sr, int clip) {
    int64_t bad = 0;
    float v[BLOCK][LANES], w[BLOCK][LANES], line[LANES * BLOCK], reciprocal[LANES], scale[LANES];
    uint16_t room[LANES * BLOCK + 72], turned[LANES];
    for (int64_t block = from; block < to; block += LANES) {
        int blocks = to - block < LANES ? (int)(to - block) : LANES;
        int64_t at = block * BLOCK;
        if (blocks < LANES) memset(line, 0, sizeof line);
        load(line, job->x, at, blocks * BLOCK, job->in_bf16);
        for (int j = 0; j < BLOCK; j++)
            for (int c = 0; c < LANES; c++) v[j][c] = line[c * BLOCK + j];
        hadamard(job, v, w);
        int32_t amax[LANES] = {0};
        for (int j = 0; j < BLOCK; j++)
            for (int c = 0; c < LANES; c++) amax[c] = max_i32(amax[c], (int32_t)(bits_of(v[j][c]) & 0x7FFFFFFFu));
        for (int c = 0; c < LANES; c++) {
            int32_t code = code_of(amax[c], job->bump);
            bad += code == 255;
            Scale s = scale_of(code);
            reciprocal[c] = s.reciprocal, scale[c] = s.scale;
        }
        const uint16_t *lanes = room;
        if (sr) lanes = noise(job, job->first_element + (uint64_t)at, LANES * BLOCK, room);
        for (int j = 0; j < BLOCK; j++) {
            if (sr)
                for (int c = 0; c < LANES; c++) turned[c] = lanes[c * BLOCK + j];
            qdq_lanes(v[j], reciprocal, scale, turned, LANES, sr, clip, LIMIT(job->out_bf16));
        }
        for (int c = 0; c < LANES; c++)
            for (int j = 0; j < BLOCK; j++) line[c * BLOCK + j] = v[j][c];
        store(job->out, at, line, blocks * BLOCK, job->out_bf16, !clip);
    }
    return bad;
}

/* A panel of LANES columns of one group of 32 along the quantised axis. */
INLINE int64_t columns(const Job *job, int64_t group, int64_t panel, int sr, int clip) {
    int64_t bad = 0, inner = job->inner, first = panel * LANES, start = group * BLOCK * inner + first;
    int n = inner - first < LANES ? (int)(inner - first) : LANES;
    float v[BLOCK][LANES], w[BLOCK][LANES], reciprocal[LANES], scale[LANES];
    uint16_t room[LANES + 72];
    int32_t amax[LANES] = {0};
    if (n < LANES) memset(v, 0, sizeof v);
    for (int j = 0; j < BLOCK; j++) {
        if (n == LANES) load(v[j], job->x, start + j * inner, LANES, job->in_bf16);
        else load(v[j], job->x, start + j * inner, n, job->in_bf16);
    }
    if (job->stages) hadamard(job, v, w);
    for (int j = 0; j < BLOCK; j++)
        for (int c = 0; c < LANES; c++) amax[c] = max_i32(amax[c], (int32_t)(bits_of(v[j][c]) & 0x7FFFFFFFu));
    if (job->tiled) { /* LANES is the width of a tile */
        int32_t most = 0;
        for (int c = 0; c < LANES; c++) most = max_i32(most, amax[c]);
        for (int c = 0; c < LANES; c++) amax[c] = most;
        bad += code_of(most, job->bump) == 255;
    }
    for (int c = 0; c < LANES; c++) {
        int32_t code = code_of(amax[c], job->bump);
        if (!job->tiled) bad += code == 255;
        Scale s = scale_of(code);
        reciprocal[c] = s.reciprocal, scale[c] = s.scale;
    }
    for (int j = 0; j < BLOCK; j++) {
        int64_t at = start + j * inner;
        const uint16_t *lanes = room;
        if (sr) lanes = noise(job, job->first_element + (uint64_t)at, LANES, room);
        qdq_lanes(v[j], reciprocal, scale, lanes, LANES, sr, clip, LIMIT(job->out_bf16));
        if (n == LANES) store(job->out, at, v[j], LANES, job->out_bf16, !clip);
        else store(job->out, at, v[j], n, job->out_bf16, !clip);
    }
    return bad;
}

/* Work units: blocks of 32 values of a row, or panels. A function for each kind, so that all its switches are constants. */
typedef int64_t Kernel(const Job *job, int64_t from, int64_t to);

#define KERNELS(kind)                                                                                 \
    static int64_t rows_##kind(const Job *job, int64_t from, int64_t to) {                            \
        return rows_plain(job, from, to, (kind) >> 1, (kind) & 1);                                    \
    }                                                                                                 \
    static int64_t turned_##kind(const Job *job, int64_t from, int64_t to) {                          \
        return rows_hadamard(job, from, to, (kind) >> 1, (kind) & 1);                                 \
    }                                                                                                 \
    static int64_t columns_##kind(const Job *job, int64_t from, int64_t to) {                         \
        int64_t bad = 0, panels = (job->inner + LANES - 1) / LANES;                                   \
        for (int64_t i = from; i < to; i++) bad += columns(job, i / panels, i % panels, (kind) >> 1, (kind) & 1); \
        return bad;                                                                                   \
    }
KERNELS(0) KERNELS(1) KERNELS(2) KERNELS(3)
static Kernel *const by_rows[] = {rows_0, rows_1, rows_2, rows_3};
static Kernel *const by_turned_rows[] = {turned_0, turned_1, turned_2, turned_3};
static Kernel *const by_columns[] = {columns_0, columns_1, columns_2, columns_3};

/* Returns the number of non-finite blocks. */
int64_t lptctl_qdq(const Job *job) {
    int kind = job->sr * 2 + job->clip;
    int is_rows = job->inner == 1;
    Kernel *kernel = (!is_rows ? by_columns : job->stages ? by_turned_rows : by_rows)[kind];
    int64_t units = is_rows ? job->outer : job->outer * ((job->inner + LANES - 1) / LANES);
    int64_t piece = is_rows ? 32 * LANES : 32, pieces = (units + piece - 1) / piece, bad = 0;
#pragma omp parallel for schedule(static) reduction(+ : bad) if (pieces > 1)
    for (int64_t i = 0; i < pieces; i++)
        bad += kernel(job, i * piece, (i + 1) * piece < units ? (i + 1) * piece : units);
    return bad;
}
