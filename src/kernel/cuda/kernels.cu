// Counting on a GPU: the integers of the other backends, bit for bit. The design is explained in mod.rs beside this file.
//
// Self-contained: neither a header nor a library is needed, so NVRTC compiles it as it stands. The same text is compiled for
// the host by tests/cuda_shim, which runs it one thread after another between barriers. So there are no warp intrinsics
// here, and whatever threads share goes through memory, atomics and __syncthreads().

typedef unsigned int u32;
typedef unsigned long long u64;

// ---- what a sketch is (src/tally/bins.rs)

#define SUB_BINS 22
#define BINS 6094
#define INFINITY_BITS 0x7F800000u
#define FIRST_NORMAL 0x00800000u
#define FIELD 0x007FFFFFu

// The result: this head, then BINS counts and BINS sums, or BINS words that hold both.
#define ZEROS 0
#define INF_POSITIVE 1
#define INF_NEGATIVE 2
#define NANS 3
#define LARGEST 4
#define SMALLEST 5
#define SIGNIFICAND_OR 6
#define LOWEST_BIT 7
#define HEAD 8
// In a packed word the count lies above the sum. No sub-bin is wider than 2^19, so 2^21 elements fit.
#define COUNT_SHIFT 41

// Kinds of elements.
#define F32 0
#define F16 1
#define BF16 2

#define THREADS 512
#define BATCH 16 // elements that a thread has in flight: four loads of 16 bytes
#define LOW 0x7FFFFu // the field bits below a sixteenth of a binade

// The rows of a block's table. Plain ones: 256 exponents, a row for each sixteenth of the binade. Beside them, for each exponent,
// the single fields {0} and {0x680000}, and the four sub-bins of the last 128th.
#define EXACT_ROWS 4096
#define LAST_ROWS (EXACT_ROWS + 2 * 256)
#define ROWS (LAST_ROWS + 4 * 256)

// Where things lie in shared memory, in words of 32 bits.
#define COUNTS 0
#define SUMS (COUNTS + ROWS) // sums of the fields' LOW bits
#define FACTS (SUMS + ROWS)
#define SKETCH_WORDS (FACTS + 12)
// The block's facts, in the order of the result's head; the lowest bit as exponent plus 150. Fewer than 2^32 elements a block,
// so its counts fit.
#define NO_LOWEST 0xFFFFu
#define LOWEST_BIAS 150

extern __shared__ __align__(16) u32 shared[];

__device__ inline u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
__device__ inline u32 larger(u32 a, u32 b) { return a > b ? a : b; }
__device__ inline u32 trailing_zeros(u32 nonzero) { return __ffs((int)nonzero) - 1; }

__device__ inline u32 sub_bin_of(u32 field) {
  u32 sixteenth = field >> 19;
  u32 sub = sixteenth + (field != 0) + (field > 0x680000u);
  if (field >= 0x7F0000u)
    sub += 1 + (field >= 0x7F8000u) + (field >= 0x7FE000u) + (field >= 0x7FF000u);
  return sub;
}

// The edge that a sub-bin's fields are summed from.
__device__ inline u32 base_of(u32 sub) {
  if (sub < 2) return 0;
  if (sub < 14) return (sub - 1) << 19;
  const u32 upper[8] = {0x680000u, 0x680000u, 0x700000u, 0x780000u, 0x7F0000u, 0x7F8000u, 0x7FE000u, 0x7FF000u};
  return upper[sub - 14];
}

struct Element {
  u32 bin;
  u32 field;
  u32 above; // the field beyond the sub-bin's base
  u32 lowest; // of the lowest set bit, exponent plus 150
};

// Any finite nonzero magnitude, subnormals normalised.
__device__ inline Element element_of(u32 magnitude) {
  u32 binade, field;
  if (magnitude >= FIRST_NORMAL) {
    binade = (magnitude >> 23) + 22;
    field = magnitude & FIELD;
  } else {
    binade = 31 - __clz((int)magnitude);
    field = (magnitude << (23 - binade)) & FIELD;
  }
  u32 sub = sub_bin_of(field);
  Element element;
  element.bin = binade * SUB_BINS + sub;
  element.field = field;
  element.above = field - base_of(sub);
  // binade - 149 + trailing zeros of the significand - 23, plus 150
  element.lowest = binade + 1 + trailing_zeros(field | FIRST_NORMAL) - 23;
  return element;
}

__device__ inline void add_to_bin(u64 *row, u32 packed, u32 bin, u64 count, u64 sum) {
  if (packed) {
    atomicAdd(row + HEAD + bin, (count << COUNT_SHIFT) + sum);
  } else {
    atomicAdd(row + HEAD + bin, count);
    atomicAdd(row + HEAD + BINS + bin, sum);
  }
}

// What a thread has seen.
struct Facts {
  u32 zeros, inf_positive, inf_negative, nans;
  u32 twice_largest; // twice the magnitude's bits: no sign
  u32 twice_smallest_less_one;
  u32 fields;
};

struct Into {
  u64 *row;
  u32 packed;
};

__device__ inline bool on_edge(u32 bits) { return (bits & LOW) == 0 || bits << 9 >= 0x7F0000u << 9; }

// The row of a normal magnitude that is on an edge.
__device__ inline u32 edge_row(u32 bits) {
  u32 exponent = bits * 2 >> 24, field = bits & FIELD;
  if (field >= 0x7F0000u)
    return LAST_ROWS + exponent * 4 + (field >= 0x7F8000u) + (field >= 0x7FE000u) + (field >= 0x7FF000u);
  if (field == 0 || field == 0x680000u) return EXACT_ROWS + exponent * 2 + (field != 0);
  return bits * 2 >> 20;
}

// The row of a normal magnitude, whatever its sign.
__device__ inline u32 row_of(u32 bits) {
  u32 row = bits * 2 >> 20;
  if (on_edge(bits)) row = edge_row(bits);
  return row;
}

// Which bin a row belongs to, and what its LOW bits are above the bin's base.
__device__ inline u32 bin_of_row(u32 row, u32 &above) {
  u32 exponent, sub;
  above = 0;
  if (row < EXACT_ROWS) {
    u32 sixteenth = row & 15;
    exponent = row >> 4;
    sub = sixteenth < 13 ? sixteenth + 1 : sixteenth + 2;
  } else if (row < LAST_ROWS) {
    exponent = (row - EXACT_ROWS) >> 1;
    sub = row & 1 ? 14 : 0;
  } else {
    exponent = (row - LAST_ROWS) >> 2;
    sub = 18 + (row & 3);
    above = base_of(sub) - 0x780000u;
  }
  return (exponent + 22) * SUB_BINS + sub;
}

// 2^32 more in a row's sum than its word can hold.
__device__ inline void carry(Into into, u32 row) {
  u32 above;
  add_to_bin(into.row, into.packed, bin_of_row(row, above), 0, (u64)1 << 32);
}

// The same normal magnitude several times, at most BATCH.
__device__ inline void add_normal(Into into, u32 bits, u32 times) {
  u32 row = row_of(bits), more = (bits & LOW) * times;
  atomicAdd(shared + COUNTS + row, times);
  u32 old = atomicAdd(shared + SUMS + row, more);
  if (old + more < old) carry(into, row);
}

__device__ inline u32 lowest_so_far() { return *(volatile u32 *)(shared + FACTS + LOWEST_BIT); }

// Any element.
__device__ inline void add_any(Into into, Facts &facts, u32 bits) {
  u32 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude == 0) {
    facts.zeros += 1;
  } else if (magnitude >= INFINITY_BITS) {
    if (magnitude > INFINITY_BITS) facts.nans += 1;
    else if (bits == magnitude) facts.inf_positive += 1;
    else facts.inf_negative += 1;
  } else {
    Element element = element_of(magnitude);
    facts.twice_largest = larger(facts.twice_largest, magnitude * 2);
    facts.twice_smallest_less_one = smaller(facts.twice_smallest_less_one, magnitude * 2 - 1);
    facts.fields |= element.field;
    if (element.lowest < lowest_so_far()) atomicMin(shared + FACTS + LOWEST_BIT, element.lowest);
    if (magnitude >= FIRST_NORMAL) add_normal(into, magnitude, 1);
    else add_to_bin(into.row, into.packed, element.bin, 1, element.above);
  }
}

// A batch's elements one by one. The loop is not unrolled, for the sake of the code's size; and an index that changes would
// put the batch into local memory, so each element is chosen by comparisons.
__device__ inline void add_one_by_one(Into into, Facts &facts, const u32 (&x)[BATCH]) {
#pragma unroll 1
  for (int i = 0; i < BATCH; i++) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < BATCH; j++) bits = i == j ? x[j] : bits;
    add_any(into, facts, bits);
  }
}

// The lowest set bit of a batch of normal numbers and zeros, told to the block.
__device__ inline void tell_lowest(const u32 (&x)[BATCH]) {
  u32 lowest = NO_LOWEST;
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    u32 bit = (x[i] * 2 >> 24) + trailing_zeros((x[i] & FIELD) | FIRST_NORMAL);
    lowest = smaller(lowest, x[i] * 2 != 0 ? bit : NO_LOWEST);
  }
  atomicMin(shared + FACTS + LOWEST_BIT, lowest);
}

// BATCH elements of a thread.
__device__ inline void add_batch(Into into, Facts &facts, const u32 (&x)[BATCH]) {
  u32 high = 0, low = 0xFFFFFFFFu, all = 0;
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    high = larger(high, x[i] * 2);
    low = smaller(low, x[i] * 2);
    all |= x[i];
  }
  if (high == 0) {
    facts.zeros += BATCH;
    return;
  }
  u32 zeros = 0;
  if (low == 0) {
    low = 0xFFFFFFFFu;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      low = smaller(low, x[i] * 2 - 1);
      zeros += x[i] * 2 == 0;
    }
    low += 1;
  }
  if (high >= INFINITY_BITS * 2 || low < FIRST_NORMAL * 2) {
    add_one_by_one(into, facts, x);
    return;
  }
  facts.zeros += zeros;
  facts.twice_largest = larger(facts.twice_largest, high);
  facts.twice_smallest_less_one = smaller(facts.twice_smallest_less_one, low - 1);
  facts.fields |= all & FIELD;
  // No element's lowest bit lies below that of the smallest exponent with the lowest field bit in use. Only where that would
  // be news to the block is each element asked.
  u32 possible = (low >> 24) + trailing_zeros((all & FIELD) | FIRST_NORMAL);
  if (possible < lowest_so_far()) tell_lowest(x);
  if (low == high) {
    // One magnitude, and zeros: all threads of a warp would meet in one row, so it is touched once a batch.
    add_normal(into, high >> 1, BATCH - zeros);
    return;
  }
  // First all additions, then what the old sums say: nothing waits for an answer in between.
  u32 row[BATCH], old[BATCH];
  if (zeros) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      row[i] = row_of(x[i]);
      old[i] = 0;
      if (x[i] * 2 != 0) {
        atomicAdd(shared + COUNTS + row[i], 1u);
        old[i] = atomicAdd(shared + SUMS + row[i], x[i] & LOW);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < BATCH; i++) row[i] = row_of(x[i]);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      atomicAdd(shared + COUNTS + row[i], 1u);
      old[i] = atomicAdd(shared + SUMS + row[i], x[i] & LOW);
    }
  }
  u32 worst = 0;
#pragma unroll
  for (int i = 0; i < BATCH; i++) worst = larger(worst, old[i]);
  if (worst >= 0u - LOW) {
#pragma unroll 1
    for (int i = 0; i < BATCH; i++) {
      u32 before = 0, bits = 0;
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        before = i == j ? old[j] : before;
        bits = i == j ? x[j] : bits;
      }
      if (before + (bits & LOW) < before) carry(into, row_of(bits));
    }
  }
}

// The f32 bits of an f16.
__device__ inline u32 widened_f16(u32 half) {
  u32 sign = (half & 0x8000u) << 16, bits = (half & 0x7FFFu) << 13;
  if (bits >= 0x7C00u << 13) return sign | INFINITY_BITS | (bits & FIELD);
  // Times 2^112, which is exact, also where the f16 and so the f32 is subnormal.
  return sign | __float_as_uint(__uint_as_float(bits) * __uint_as_float((127 + 112) << 23));
}

template <int KIND> __device__ inline u32 widened(u32 half) { return KIND == F16 ? widened_f16(half) : half << 16; }

// The element at a place, as f32 bits.
template <int KIND> __device__ inline u32 load_one(const void *data, u64 place) {
  if (KIND == F32) return ((const u32 *)data)[place];
  return widened<KIND>(((const unsigned short *)data)[place]);
}

__device__ inline uint4 load_16_bytes(const uint4 *from) { return __ldcs(from); }

// Moves a block's table to the result.
__device__ inline void empty_table(Into into) {
  for (u32 row = threadIdx.x; row < ROWS; row += blockDim.x) {
    u64 count = shared[COUNTS + row];
    if (count == 0) continue;
    u32 above, bin = bin_of_row(row, above);
    // In wrapping arithmetic: a sum can lack carries that lie in the result already.
    add_to_bin(into.row, into.packed, bin, count, shared[SUMS + row] - count * above);
  }
}

// Moves a block's facts to the result.
__device__ inline void empty_facts(u64 *row) {
  const u32 *facts = shared + FACTS;
  if (threadIdx.x != 0) return;
  for (int i = ZEROS; i <= NANS; i++)
    if (facts[i]) atomicAdd(row + i, (u64)facts[i]);
  if (facts[LARGEST] == 0) return;
  atomicMax(row + LARGEST, (u64)(facts[LARGEST] >> 1));
  atomicMin(row + SMALLEST, (u64)((facts[SMALLEST] >> 1) + 1));
  atomicOr(row + SIGNIFICAND_OR, (u64)facts[SIGNIFICAND_OR]);
  atomicMin((long long *)(row + LOWEST_BIT), (long long)facts[LOWEST_BIT] - LOWEST_BIAS);
}

template <int KIND> __device__ inline void sketch(const void *data, u64 elements, u64 *row, u32 packed) {
  Into into = {row, packed};
  Facts facts = {0, 0, 0, 0, 0, 0xFFFFFFFFu, 0};
  for (u32 i = threadIdx.x; i < SKETCH_WORDS; i += blockDim.x)
    shared[i] = i == FACTS + SMALLEST ? 0xFFFFFFFFu : i == FACTS + LOWEST_BIT ? NO_LOWEST : 0;
  __syncthreads();

  // 16-bit elements come here only where they are few: gradscale_patterns is faster.
  u64 head = 0, tiles = 0;
  if (KIND == F32) {
    head = (16 - (u64)data % 16) % 16 / 4;
    if (head > elements) head = elements;
    tiles = (elements - head) / (THREADS * BATCH);
    const uint4 *vector = (const uint4 *)((const u32 *)data + head) + threadIdx.x;
    for (u64 i = blockIdx.x; i < tiles; i += gridDim.x) {
      u32 x[BATCH];
#pragma unroll
      for (int k = 0; k < BATCH / 4; k++) {
        // Neighbours read neighbours.
        uint4 v = load_16_bytes(vector + i * (THREADS * BATCH / 4) + k * THREADS);
        x[4 * k] = v.x;
        x[4 * k + 1] = v.y;
        x[4 * k + 2] = v.z;
        x[4 * k + 3] = v.w;
      }
      add_batch(into, facts, x);
    }
  }
  // What does not fill a tile, and what lies before the first 16-byte boundary.
  u64 tiled = tiles * (THREADS * BATCH);
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < elements - tiled; i += (u64)gridDim.x * blockDim.x)
    add_any(into, facts, load_one<KIND>(data, i < head ? i : i + tiled));

  u32 *block = shared + FACTS;
  if (facts.zeros) atomicAdd(block + ZEROS, facts.zeros);
  if (facts.inf_positive) atomicAdd(block + INF_POSITIVE, facts.inf_positive);
  if (facts.inf_negative) atomicAdd(block + INF_NEGATIVE, facts.inf_negative);
  if (facts.nans) atomicAdd(block + NANS, facts.nans);
  if (facts.twice_largest) {
    atomicMax(block + LARGEST, facts.twice_largest);
    atomicMin(block + SMALLEST, facts.twice_smallest_less_one);
    atomicOr(block + SIGNIFICAND_OR, facts.fields);
  }
  __syncthreads();
  empty_table(into);
  empty_facts(row);
}

// `row`: the result, to be added to. Before the first launch its head is 0, but SMALLEST 0x7FFFFFFF and LOWEST_BIT 32767.
// `packed`: one word a bin; only for up to 2^21 elements in all. Fewer than 2^32 elements a block.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gradscale_sketch_f32(const void *data, u64 elements, u64 *row, u32 packed) {
  sketch<F32>(data, elements, row, packed);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gradscale_sketch_f16(const void *data, u64 elements, u64 *row, u32 packed) {
  sketch<F16>(data, elements, row, packed);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gradscale_sketch_bf16(const void *data, u64 elements, u64 *row, u32 packed) {
  sketch<BF16>(data, elements, row, packed);
}

// ---- 16-bit elements by pattern

#define PATTERN_THREADS 1024
#define PATTERN_BATCH 32 // four loads of 16 bytes
#define MOST 0x8000u

// Adds `times` elements of one pattern to its half of a counter: the lower half counts positive ones, the upper negative.
// A counter's half that reaches MOST is emptied into the result at once. Between two barriers a block adds no more than
// 1024 * 32 = MOST elements, and before each barrier every half lies below MOST: so no half runs over.
__device__ inline void settle(u64 *patterns, u32 word, u32 pattern, u32 old, u32 times) {
  u32 shift = (pattern >> 15) * 16, half = old >> shift & 0xFFFFu;
  if (half < MOST && half + times >= MOST) {
    atomicSub(shared + word, MOST << shift);
    atomicAdd(patterns + pattern, (u64)MOST);
  }
}

// Counts elements by pattern, for those whose magnitude lies in first .. first + window; 4 * window bytes of shared memory.
// `patterns`: 65,536 counts, to be added to. Of zeros only the negative ones are counted: the positive ones are the rest.
extern "C" __global__ void __launch_bounds__(PATTERN_THREADS, 1)
    gradscale_patterns(const unsigned short *data, u64 elements, u64 *patterns, u32 first, u32 window) {
  u32 negative_zeros = 0;
  // The nonzero ones among the magnitudes of this pass.
  const u32 lowest = first ? first : 1, span = first + window - lowest;
  for (u32 i = threadIdx.x; i < window; i += blockDim.x) shared[i] = 0;
  __syncthreads();
  const u32 tile = PATTERN_THREADS * PATTERN_BATCH;
  u64 head = ((16 - (u64)data % 16) % 16) / 2;
  if (head > elements) head = elements;
  u64 tiles = (elements - head) / tile;
  const uint4 *vector = (const uint4 *)(data + head) + threadIdx.x;
  uint4 next[4];
  if (blockIdx.x < tiles) {
#pragma unroll
    for (int k = 0; k < 4; k++) next[k] = load_16_bytes(vector + (u64)blockIdx.x * (tile / 8) + k * PATTERN_THREADS);
  }
  for (u64 i = blockIdx.x; i < tiles; i += gridDim.x) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const u32 words[4] = {next[part].x, next[part].y, next[part].z, next[part].w};
      // The same part of the next tile is on its way while the others are counted and the barrier is waited for.
      if (i + gridDim.x < tiles) next[part] = load_16_bytes(vector + (i + gridDim.x) * (tile / 8) + part * PATTERN_THREADS);
      u32 pattern[8], beyond = 0;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        pattern[k] = k & 1 ? words[k / 2] >> 16 : words[k / 2] & 0xFFFFu;
        beyond = larger(beyond, (pattern[k] & 0x7FFFu) - lowest);
      }
      if (words[0] == words[1] && words[0] == words[2] && words[0] == words[3] && pattern[0] == pattern[1]) {
        // All threads of a warp may meet in one word, so it is touched once a part.
        u32 magnitude = pattern[0] & 0x7FFFu;
        if (beyond < span) {
          u32 before = atomicAdd(shared + magnitude - first, 8u << (pattern[0] >> 15) * 16);
          settle(patterns, magnitude - first, pattern[0], before, 8);
        } else if (pattern[0] == 0x8000u) {
          negative_zeros += 8;
        }
        continue;
      }
      if (beyond >= span) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
          u32 magnitude = pattern[k] & 0x7FFFu;
          if (magnitude - lowest < span) {
            u32 before = atomicAdd(shared + magnitude - first, 1 + (pattern[k] >> 15) * 0xFFFFu);
            settle(patterns, magnitude - first, pattern[k], before, 1);
          } else if (pattern[k] == 0x8000u) {
            negative_zeros += 1;
          }
        }
        continue;
      }
      // All of them count here: nothing waits for an answer between the additions.
      u32 old[8], reached = 0;
#pragma unroll
      for (int k = 0; k < 8; k++) old[k] = atomicAdd(shared + (pattern[k] & 0x7FFFu) - first, 1 + (pattern[k] >> 15) * 0xFFFFu);
#pragma unroll
      for (int k = 0; k < 8; k++) reached |= old[k] + 1 + (pattern[k] >> 15) * 0xFFFFu;
      // Rare, as most counters are seen below MOST.
      if (reached & (MOST | MOST << 16)) {
#pragma unroll
        for (int k = 0; k < 8; k++) settle(patterns, (pattern[k] & 0x7FFFu) - first, pattern[k], old[k], 1);
      }
    }
    __syncthreads();
  }
  u64 rest = elements - tiles * tile;
  // Each block adds at most 1024 elements between barriers here, too: a tile's worth is never reached.
  for (u64 begin = (u64)blockIdx.x * blockDim.x; begin < rest; begin += (u64)gridDim.x * blockDim.x) {
    u64 i = begin + threadIdx.x;
    if (i < rest) {
      u32 pattern = data[i < head ? i : i + tiles * tile], magnitude = pattern & 0x7FFFu;
      if (magnitude - lowest < span) {
        u32 old = atomicAdd(shared + magnitude - first, 1 + (pattern >> 15) * 0xFFFFu);
        settle(patterns, magnitude - first, pattern, old, 1);
      } else if (pattern == 0x8000u) {
        negative_zeros += 1;
      }
    }
    __syncthreads();
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < window; i += blockDim.x) {
    u32 both = shared[i];
    if (both & 0xFFFFu) atomicAdd(patterns + first + i, (u64)(both & 0xFFFFu));
    if (both >> 16) atomicAdd(patterns + (0x8000u | (first + i)), (u64)(both >> 16));
  }
  // Once is enough, however many windows there are.
  if (negative_zeros && first == 0) atomicAdd(patterns + 0x8000u, (u64)negative_zeros);
}

// Turns counts of patterns into a sketch's result: 65,536 threads in all. `kind`: F16 or BF16. `elements`: all of them, whose
// positive zeros are not among the patterns.
extern "C" __global__ void __launch_bounds__(256)
    gradscale_patterns_to_sketch(const u64 *patterns, u32 kind, u64 elements, u64 *row, u32 packed) {
  u32 pattern = blockIdx.x * blockDim.x + threadIdx.x;
  if (pattern == 0) atomicAdd(row + ZEROS, elements);
  if (pattern >= 0x10000u || patterns[pattern] == 0) return;
  u64 times = patterns[pattern];
  u32 bits = kind == F16 ? widened<F16>(pattern) : widened<BF16>(pattern), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude == 0) return; // among the zeros already
  atomicAdd(row + ZEROS, 0 - times);
  if (magnitude >= INFINITY_BITS) {
    atomicAdd(row + (magnitude > INFINITY_BITS ? NANS : bits == magnitude ? INF_POSITIVE : INF_NEGATIVE), times);
    return;
  }
  Element element = element_of(magnitude);
  add_to_bin(row, packed, element.bin, times, times * element.above);
  atomicMax(row + LARGEST, (u64)magnitude);
  atomicMin(row + SMALLEST, (u64)magnitude);
  atomicOr(row + SIGNIFICAND_OR, (u64)element.field);
  atomicMin((long long *)(row + LOWEST_BIT), (long long)element.lowest - LOWEST_BIAS);
}

// ---- the largest magnitude alone, every step

#define EXTREMES_THREADS 256
// Twice an element's bits plus this, in wrapping arithmetic, sorts infinity < NaN < finite by magnitude (python's recorder).
#define ORDER (0x01000000u - 0x80000000u)

struct Extremes {
  int low, high;
  bool nan;
};

__device__ inline void see(Extremes &extremes, u32 bits) {
  int order = (int)(bits * 2 + ORDER);
  extremes.low = order < extremes.low ? order : extremes.low;
  extremes.high = order > extremes.high ? order : extremes.high;
  extremes.nan |= bits * 2 > INFINITY_BITS * 2;
}

template <int KIND> __device__ inline Extremes extremes_of(const void *data, u64 elements) {
  Extremes extremes = {0x7FFFFFFF, (int)0x80000000, false};
  const u32 element_bytes = KIND == F32 ? 4 : 2, each = 16 / element_bytes, ahead = 4;
  u64 head = (16 - (u64)data % 16) % 16 / element_bytes;
  if (head > elements) head = elements;
  const uint4 *vector = (const uint4 *)((const char *)data + head * element_bytes);
  u64 start = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
  u64 whole = (elements - head) / each / (ahead * step) * (ahead * step);
  for (u64 i = start; i < whole; i += ahead * step) {
    uint4 v[ahead];
#pragma unroll
    for (u32 k = 0; k < ahead; k++) v[k] = load_16_bytes(vector + i + k * step);
#pragma unroll
    for (u32 k = 0; k < ahead; k++) {
      const u32 words[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (KIND == F32) {
          see(extremes, words[j]);
        } else {
          see(extremes, widened<KIND>(words[j] & 0xFFFFu));
          see(extremes, widened<KIND>(words[j] >> 16));
        }
      }
    }
  }
  for (u64 i = start; i < elements - whole * each; i += step)
    see(extremes, load_one<KIND>(data, i < head ? i : i + whole * each));
  return extremes;
}

// `result`: the smallest and the largest of the elements in ORDER, to be begun with 0x7FFFFFFF and 0x80000000, and a word that
// becomes an f32 NaN where there is a NaN, to be begun with 0.
extern "C" __global__ void __launch_bounds__(EXTREMES_THREADS)
    gradscale_extremes(const void *data, u64 elements, u32 kind, int *result) {
  int *block = (int *)shared;
  if (threadIdx.x == 0) {
    block[0] = 0x7FFFFFFF;
    block[1] = (int)0x80000000;
    block[2] = 0;
  }
  __syncthreads();
  Extremes extremes = kind == F32   ? extremes_of<F32>(data, elements)
                      : kind == F16 ? extremes_of<F16>(data, elements)
                                    : extremes_of<BF16>(data, elements);
  atomicMin(block, extremes.low);
  atomicMax(block + 1, extremes.high);
  if (extremes.nan) atomicOr(block + 2, 0x7FC00000);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicMin(result, block[0]);
    atomicMax(result + 1, block[1]);
    if (block[2]) atomicOr(result + 2, block[2]);
  }
}

// ---- exact replay at any scale (src/analysis/raw.rs)

#define REPLAY_THREADS 256
#define REPLAY_BATCH 4
// Of each interval: its count, and as pairs of words, low and high, Σ significand, and the sums of the lower and the upper 24
// bits of significand².
#define INTERVAL_WORDS 7
// Of each interval in the result: count, Σ significand, and the two sums of squares.
#define INTERVAL_SUMS 4

__device__ inline void add_wide(u32 *low, u32 *high, u32 more) {
  u32 old = atomicAdd(low, more);
  if (old + more < old) atomicAdd(high, 1u);
}

struct Cuts {
  const u32 *edges; // where each interval begins
  const u32 *first; // by a magnitude's upper 16 bits, the interval in which the first such magnitude lies
};

__device__ inline u32 interval_of(Cuts cuts, u32 magnitude) {
  u32 low = cuts.first[magnitude >> 16], high = cuts.first[(magnitude >> 16) + 1];
  // The last interval whose edge is not above the magnitude.
  while (low < high) {
    u32 middle = (low + high + 1) / 2;
    if (cuts.edges[middle] <= magnitude) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Counts `elements` f32 by interval. `copies`: how many tables a block has in shared memory, a power of two, one after another
// lane by lane, so that neighbours seldom meet; 0 where not even one fits. `sums`: INTERVAL_SUMS for each interval, added to.
extern "C" __global__ void __launch_bounds__(REPLAY_THREADS)
    gradscale_replay(const u32 *data, u64 elements, const u32 *edges, const u32 *first, u32 intervals, u32 copies, u64 *sums) {
  Cuts cuts = {edges, first};
  u32 words = intervals * INTERVAL_WORDS * copies;
  for (u32 i = threadIdx.x; i < words; i += blockDim.x) shared[i] = 0;
  __syncthreads();
  u32 *mine = shared + (copies ? threadIdx.x % copies : 0);
  u64 step = (u64)gridDim.x * blockDim.x;
  u64 start = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  for (u64 i = start; i < elements; i += REPLAY_BATCH * step) {
    u32 x[REPLAY_BATCH], at[REPLAY_BATCH];
#pragma unroll
    for (int k = 0; k < REPLAY_BATCH; k++) x[k] = i + k * step < elements ? data[i + k * step] & 0x7FFFFFFFu : 0;
#pragma unroll
    for (int k = 0; k < REPLAY_BATCH; k++) at[k] = x[k] - 1 < INFINITY_BITS - 1 ? interval_of(cuts, x[k]) : 0;
#pragma unroll
    for (int k = 0; k < REPLAY_BATCH; k++) {
      if (x[k] - 1 >= INFINITY_BITS - 1) continue;
      u32 significand = x[k] < FIRST_NORMAL ? x[k] : (x[k] & FIELD) | FIRST_NORMAL;
      u64 square = (u64)significand * significand;
      u32 low = (u32)square & 0xFFFFFFu, high = (u32)(square >> 24);
      if (copies) {
        u32 *words = mine + at[k] * (INTERVAL_WORDS * copies);
        atomicAdd(words, 1u);
        add_wide(words + copies, words + 2 * copies, significand);
        add_wide(words + 3 * copies, words + 4 * copies, low);
        add_wide(words + 5 * copies, words + 6 * copies, high);
      } else {
        u64 *interval = sums + at[k] * INTERVAL_SUMS;
        atomicAdd(interval, (u64)1);
        atomicAdd(interval + 1, (u64)significand);
        atomicAdd(interval + 2, (u64)low);
        atomicAdd(interval + 3, (u64)high);
      }
    }
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < intervals * copies; i += blockDim.x) {
    const u32 *words = shared + i % copies + i / copies * (INTERVAL_WORDS * copies);
    u64 *interval = sums + i / copies * INTERVAL_SUMS;
    if (words[0] == 0) continue;
    atomicAdd(interval, (u64)words[0]);
    for (int k = 1; k < INTERVAL_SUMS; k++)
      atomicAdd(interval + k, (u64)words[(2 * k - 1) * copies] + ((u64)words[2 * k * copies] << 32));
  }
}

// A format at a scale (src/kernel/rounding.rs).
struct Rounding {
  double scale, up, smallest_normal, first_nonzero, first_overflow;
};

#define ERROR_BLOCK 512 // elements that the backends sum over in one fixed order
#define ERROR_LANES 16
#define ERROR_BLOCKS (REPLAY_THREADS / ERROR_LANES) // side by side in a block of threads
#define ERROR_SCALES 4 // between two barriers
#define ERROR_EACH (ERROR_BLOCK / ERROR_LANES)

__device__ inline double magnitude_of(double x) { return __longlong_as_double(__double_as_longlong(x) & 0x7FFFFFFFFFFFFFFFll); }

// Sums the errors of each ERROR_BLOCK elements at every scale, as the other backends do: over sixteen lanes, joined in one fixed
// order. Nothing may be fused: this is compiled with --fmad=false. `sums`: for each block of elements and each scale,
// Σ |y − x·s| / |x| and Σ (y − x·s)².
extern "C" __global__ void __launch_bounds__(REPLAY_THREADS)
    gradscale_errors(const float *data, u64 elements, const Rounding *roundings, u32 scales, double *sums) {
  double *lanes = (double *)shared; // [block][scale][relative, squares][lane]
  const u32 lane = threadIdx.x % ERROR_LANES, mine = threadIdx.x / ERROR_LANES;
  const u64 blocks = (elements + ERROR_BLOCK - 1) / ERROR_BLOCK;
  for (u64 begin = (u64)blockIdx.x * ERROR_BLOCKS; begin < blocks; begin += (u64)gridDim.x * ERROR_BLOCKS) {
    float values[ERROR_EACH];
    double inverse[ERROR_EACH];
#pragma unroll
    for (int i = 0; i < ERROR_EACH; i++) {
      u64 place = (begin + mine) * ERROR_BLOCK + i * ERROR_LANES + lane;
      u32 bits = place < elements ? __float_as_uint(data[place]) : 0;
      bool counts = (bits & 0x7FFFFFFFu) - 1 < INFINITY_BITS - 1;
      values[i] = counts ? __uint_as_float(bits) : 0.0f;
      inverse[i] = counts ? 1.0 / magnitude_of((double)values[i]) : 0.0;
    }
    for (u32 from = 0; from < scales; from += ERROR_SCALES) {
      for (u32 s = 0; s < ERROR_SCALES && from + s < scales; s++) {
        const Rounding rounding = roundings[from + s];
        double relative = 0.0, squares = 0.0;
#pragma unroll
        for (int i = 0; i < ERROR_EACH; i++) {
          double x = values[i], product = x * rounding.scale, magnitude = magnitude_of(x);
          double v = (double)(float)product;
          double binade = __longlong_as_double(__double_as_longlong(v) & 0x7FF0000000000000ll);
          double c = rounding.up * (binade > rounding.smallest_normal ? binade : rounding.smallest_normal);
          double y = (v + c) - c;
          y = magnitude < rounding.first_nonzero ? 0.0 : y;
          double error = magnitude < rounding.first_overflow ? y - product : 0.0;
          relative = relative + magnitude_of(error) * inverse[i];
          squares = squares + error * error;
        }
        double *own = lanes + ((mine * ERROR_SCALES + s) * 2) * ERROR_LANES + lane;
        own[0] = relative;
        own[ERROR_LANES] = squares;
      }
      __syncthreads();
      for (u32 i = threadIdx.x; i < ERROR_BLOCKS * ERROR_SCALES * 2; i += blockDim.x) {
        u32 which = i % 2, s = from + i / 2 % ERROR_SCALES;
        u64 block = begin + i / (2 * ERROR_SCALES);
        if (block >= blocks || s >= scales) continue;
        double part[ERROR_LANES];
#pragma unroll
        for (int l = 0; l < ERROR_LANES; l++) part[l] = lanes[i * ERROR_LANES + l];
#pragma unroll
        for (int apart = ERROR_LANES / 2; apart > 0; apart /= 2)
#pragma unroll
          for (int l = 0; l < apart; l++) part[l] = part[l] + part[l + apart];
        sums[(block * scales + s) * 2 + which] = part[0];
      }
      __syncthreads();
    }
  }
}

// Adds the sums of the blocks to `errors`, in the order of the elements; a thread for each scale and kind of sum.
extern "C" __global__ void __launch_bounds__(REPLAY_THREADS)
    gradscale_errors_in_order(const double *sums, u64 blocks, u32 scales, double *errors) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= 2 * scales) return;
  double sum = errors[i];
#pragma unroll 8
  for (u64 block = 0; block < blocks; block++) sum = sum + sums[block * (2 * scales) + i];
  errors[i] = sum;
}
