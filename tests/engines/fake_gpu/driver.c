/* Loaded before torch: answers of the C++ functions and of the CUDA driver by which torch looks at its GPUs. */
#include <string.h>
#include "driver_types.h"

static int device_count = 0;
static struct cudaDeviceProp properties;

/* Called by h100.py once torch is imported: during the import there is no GPU. */
void kit_show_devices(int count) {
    device_count = count;
    memset(&properties, 0, sizeof properties);
    strcpy(properties.name, "NVIDIA H100 80GB HBM3");
    properties.major = 9;
    properties.minor = 0;
    properties.multiProcessorCount = 132;
    properties.totalGlobalMem = 85045084160UL;
    properties.warpSize = 32;
    properties.maxThreadsPerBlock = 1024;
    properties.maxThreadsPerMultiProcessor = 2048;
    properties.sharedMemPerBlock = 49152;
    properties.sharedMemPerBlockOptin = 232448;
    properties.sharedMemPerMultiprocessor = 233472;
    properties.regsPerMultiprocessor = 65536;
    properties.l2CacheSize = 52428800;
}

/* c10::cuda::device_count, device_count_ensure_non_zero; at::cuda::getCurrentDeviceProperties, getDeviceProperties */
signed char _ZN3c104cuda12device_countEv(void) { return device_count; }
signed char _ZN3c104cuda28device_count_ensure_non_zeroEv(void) { return device_count ? device_count : 1; }
struct cudaDeviceProp *_ZN2at4cuda26getCurrentDevicePropertiesEv(void) { return &properties; }
struct cudaDeviceProp *_ZN2at4cuda19getDevicePropertiesEa(signed char device) { return &properties; }

/* The version of cuDNN of torch 2.11's wheels, 9.19. */
unsigned long cudnnGetVersion(void) { return 91900; }

/* No process has a context on any device. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 0;
    return 0;
}

/* Whatever else is asked of the driver: CUDA_ERROR_NO_DEVICE. */
#define NO_DEVICE(name) int name(void) { return 100; }
NO_DEVICE(cuCtxGetCurrent)
NO_DEVICE(cuCtxSetCurrent)
NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDeviceGetAttribute)
NO_DEVICE(cuDevicePrimaryCtxRetain)
NO_DEVICE(cuFuncGetAttribute)
NO_DEVICE(cuFuncSetAttribute)
NO_DEVICE(cuFuncSetCacheConfig)
NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuLaunchCooperativeKernel)
NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuLinkAddData_v2)
NO_DEVICE(cuLinkComplete)
NO_DEVICE(cuLinkCreate_v2)
NO_DEVICE(cuModuleGetFunction)
NO_DEVICE(cuModuleLoad)
NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleLoadDataEx)
NO_DEVICE(cuModuleUnload)
NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DEVICE(cuPointerGetAttribute)
NO_DEVICE(cuTensorMapEncodeTiled)
