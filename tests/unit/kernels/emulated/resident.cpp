// All layers of a step by the kernel of resident.cu, on a CPU. BLOCKS is small here.

#include <algorithm>

#include "resident.cu"

extern "C" int decode_layers_here(const Step* step, int shared_bytes, int late, unsigned seed) {
    return emulated::run(BLOCKS, THREADS, shared_bytes, late, seed, [&](char* memory) { Block(*step, memory).run(); });
}

char memory[1];  // of the kernel's own entry, which nobody calls
