/* The choice among the specialised copies of a sweep; included in the two functions of bn_simd.h that dispatch. */
if (!backward && sums) switch (plain) { PLAIN(FORWARD_SUM) }
else if (!backward) switch (key) { FORWARD(FORWARD_WRITE) }
else if (sums) switch (key) { BACKWARD(BACKWARD_SUM) }
else if (keep) switch (key) { KEPT(KEPT_WRITE) }
else switch (key) { BACKWARD(BACKWARD_WRITE) }
#undef FORWARD_SUM
#undef FORWARD_WRITE
#undef BACKWARD_SUM
#undef BACKWARD_WRITE
#undef KEPT_WRITE
