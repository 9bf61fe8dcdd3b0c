/* The arithmetic, for vectors of BN_LANES floats; bn.c includes this file once per instruction set.
 *
 * Two views of the tensor serve all layouts:
 *   - "runs": [batch][channels][positions] with many positions. A channel is `batch` runs of contiguous floats.
 *     Both sweeps go through memory in its order, a chunk of samples per thread; long runs of a tensor past the caches,
 *     and short channels, go one channel after the other, from its sums to its output.
 *   - "matrix": rows of columns, a vector holding neighbouring columns. The channel-last layout is one (columns are
 *     channels), and so is a batch with few positions (columns are channel x position, added up per channel).
 *
 * A thread has the same part of the tensors in both sweeps and in every call: to write a line that another core has, too,
 * takes ten times as long.
 *
 * Two sweeps make every operation. The first takes two sums per channel, of u and of u*d with d = x - centre:
 *   forward   u = d              centre = a guess of the mean (d and d*d give the moments)
 *   backward  u = g = dy * act'  centre = the mean            (g and g*d give dbeta, dgamma, dx)
 * The second writes y = act(d*scale + offset [+ residual]) or dx = (g + d*grad_x + grad_1) * scale.
 *
 * A few numbers are added in float32 before they join a double: of a column two chains of at most eight, then the two; of a
 * run two chains of at most eleven, then the two, then the vector's halves. So the sums are nearly as good as double sums,
 * for a fraction of the conversions. Vectors are GCC's (and clang's) vector extensions, which any CPU can run; the few
 * conversions that compilers translate badly have intrinsics beside the general form.
 *
 * Every INLINE function takes its variants (dtype, activation, ...) as arguments that are constants after inlining:
 * the macros at the end of bn_sweeps.h make the specialised copies. */

#define L BN_LANES
#define vf NAME(vf)
#define vfh NAME(vfh)
#define vdh NAME(vdh)
#define vi NAME(vi)
#define vu NAME(vu)
#define vh NAME(vh)
#define coefficients NAME(coefficients)

typedef float vf __attribute__((vector_size(4 * L)));
typedef float vfh __attribute__((vector_size(2 * L)));
typedef double vdh __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));
typedef uint16_t vh __attribute__((vector_size(2 * L)));

#include "bn_vectors.h"
#include "bn_sweeps.h"
#if BN_HAS(BN_REST)
#include "bn_tasks.h"
#endif

#undef L
#undef vf
#undef vfh
#undef vdh
#undef vi
#undef vu
#undef vh
#undef coefficients
