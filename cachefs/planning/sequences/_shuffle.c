/* The swaps of torch.randperm on a CPU (randperm_cpu in ATen/native/TensorFactories.cpp), for cachefs.sampler.
 *
 * Each swap depends on the ones before, so numpy cannot do them at once: 1.28 M of them take 3 ms here and 0.7 s
 * in Python. Loaded by ctypes, which lets go of the GIL meanwhile.
 */
#include <stddef.h>
#include <stdint.h>

/* draws: count - 1 outputs of the generator. order: count numbers, shuffled in place. */
void cachefs_shuffle(uint32_t *order, const uint32_t *draws, size_t count) {
    for (size_t i = 0; i + 1 < count; i++) {
        size_t j = i + draws[i] % (uint32_t)(count - i);
        uint32_t chosen = order[j];
        order[j] = order[i];
        order[i] = chosen;
    }
}
