/* All that the library takes from <math.h>. */
#ifdef __cplusplus
extern "C" {
#endif
double exp(double x);
float expf(float x);
float fabsf(float x);
double log(double x);
double log1p(double x);
float logf(float x);
double sqrt(double x);
float sqrtf(float x);
double tanh(double x);
float tanhf(float x);
#ifdef __cplusplus
}
#endif
