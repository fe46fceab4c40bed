/* The part of CANN 9.1's runtime that torch_npu's device layer calls, over this machine's memory.
 *
 * A stream is a thread that does its copies, records and waits in the order in which they were given, later than the
 * call: host_hold keeps it from going on, so that a test decides when. New device memory is full of NaN. A thread
 * uses a device only after aclrtSetDevice there. host_break lets every call fail, as after an error of the device.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEVICES = 2, CUBE_CORES = 20, VECTOR_CORES = 40 };
enum { OK = 0, BAD_ARGUMENT = 107000, NO_CONTEXT = 107002, OTHER_CONTEXT = 107003, OUT_OF_MEMORY = 207001 };
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE };
static const size_t MEMORY = (size_t)1 << 30, ALIGNMENT = (size_t)2 << 20;

typedef struct Event {
    long recorded, done;  /* records given, records passed */
    int device, uses, is_destroyed;
    double passed_ms;
} Event;
typedef struct Task {
    enum { COPY, RECORD, WAIT } kind;
    void *target;
    const void *source;
    size_t size;
    Event *event;
    long record;
    struct Task *next;
} Task;
typedef struct Stream {
    int device, is_held, is_busy, is_destroyed;
    Task *first, **last;
    struct Stream *next;
} Stream;
typedef struct Block {
    char *start;
    size_t size;
    int device;
    struct Block *next;
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams;
static Block *blocks;
static size_t used[DEVICES];
static uint32_t limits[DEVICES][2] = {{CUBE_CORES, VECTOR_CORES}, {CUBE_CORES, VECTOR_CORES}};
static int broken;
static __thread int current = -1;

#define LOCKED(statements) \
    do { \
        pthread_mutex_lock(&lock); \
        statements; \
        pthread_mutex_unlock(&lock); \
    } while (0)
#define NEED_CONTEXT \
    if (broken) return broken; \
    if (current < 0) return NO_CONTEXT

/* Devices and contexts */

int aclInit(const char *config) { return OK; }
int aclFinalize(void) { return OK; }
int aclsysGetCANNVersion(int package, char *version) { return strcpy(version, "9.1.0"), OK; }
int aclsysGetVersionStr(const char *package, char *version) { return strcpy(version, "9.1.0"), OK; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
int aclrtGetDeviceCount(uint32_t *count) { return *count = DEVICES, OK; }
int aclrtResetDevice(int device) { return OK; }
int aclrtSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return BAD_ARGUMENT;
    current = device;
    return OK;
}
int aclrtGetDevice(int *device) {
    NEED_CONTEXT;
    return *device = current, OK;
}
int aclrtGetCurrentContext(void **context) {
    NEED_CONTEXT;
    return *context = &limits[current], OK;
}
int aclrtSetCurrentContext(void *context) {
    return aclrtSetDevice((int)((uint32_t(*)[2])context - limits));
}
int aclGetDeviceCapability(uint32_t device, int what, int64_t *value) {
    *value = what == 0 ? CUBE_CORES : what == 1 ? VECTOR_CORES : 192 << 20;
    return OK;
}
int aclrtGetDeviceInfo(uint32_t device, int what, int64_t *value) {
    return what == 301 ? *value = MEMORY, OK : BAD_ARGUMENT;
}
int aclrtGetDeviceResLimit(int device, int what, uint32_t *value) { return *value = limits[device][what], OK; }
int aclrtSetDeviceResLimit(int device, int what, uint32_t value) { return limits[device][what] = value, OK; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return OK; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { return OK; }
int aclrtSetDeviceSatMode(int mode) { return OK; }
int aclrtGetSysParamOpt(int option, int64_t *value) { return *value = 0, OK; }
int aclrtSetSysParamOpt(int option, int64_t value) { return OK; }
int aclrtCtxGetSysParamOpt(int option, int64_t *value) { return *value = 0, OK; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return OK; }

/* Memory */

static Block *block_of(const void *address, size_t size) {
    for (Block *block = blocks; block; block = block->next)
        if ((char *)address >= block->start && (char *)address + size <= block->start + block->size) return block;
    return NULL;
}
int aclrtMalloc(void **address, size_t size, int policy) {
    NEED_CONTEXT;
    Block *block = malloc(sizeof *block);
    int is_full;
    LOCKED(is_full = used[current] + size > MEMORY; used[current] += is_full ? 0 : size);
    if (is_full || posix_memalign((void **)&block->start, ALIGNMENT, size)) return free(block), OUT_OF_MEMORY;
    memset(block->start, 0xff, size);
    block->size = size, block->device = current;
    *address = block->start;
    LOCKED(block->next = blocks; blocks = block);
    return OK;
}
int aclrtMallocAlign32(void **address, size_t size, int policy) { return aclrtMalloc(address, size, policy); }
int aclrtFree(void *address) {
    NEED_CONTEXT;
    Block *found = NULL;
    pthread_mutex_lock(&lock);
    for (Block **place = &blocks; *place; place = &(*place)->next)
        if ((*place)->start == address) {
            found = *place, *place = found->next;
            used[found->device] -= found->size;
            break;
        }
    pthread_mutex_unlock(&lock);
    if (!found) return BAD_ARGUMENT;
    free(found->start), free(found);
    return OK;
}
int aclrtMallocHost(void **address, size_t size) {
    NEED_CONTEXT;
    return posix_memalign(address, 4096, size) ? OUT_OF_MEMORY : OK;
}
int aclrtFreeHost(void *address) { return free(address), OK; }
int aclrtGetMemInfo(int kind, size_t *left, size_t *total) {
    NEED_CONTEXT;
    LOCKED(*left = MEMORY - used[current]);
    return *total = MEMORY, OK;
}

/* Streams */

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}
static void *serve(void *given) {
    Stream *stream = given;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (stream->is_held || !stream->first) {
            if (stream->is_destroyed && !stream->first) return pthread_mutex_unlock(&lock), NULL;
            pthread_cond_wait(&changed, &lock);
        }
        Task *task = stream->first;
        Event *event = task->event;
        if (!(stream->first = task->next)) stream->last = &stream->first;
        stream->is_busy = 1;
        if (task->kind == COPY) {
            pthread_mutex_unlock(&lock);
            memcpy(task->target, task->source, task->size);
            pthread_mutex_lock(&lock);
        } else if (task->kind == RECORD) {
            event->done = task->record, event->passed_ms = now_ms();
        } else {
            while (event->done < task->record) pthread_cond_wait(&changed, &lock);
        }
        if (event && !--event->uses && event->is_destroyed) free(event);
        free(task);
        stream->is_busy = 0;
        pthread_cond_broadcast(&changed);
    }
}
int aclrtCreateStreamWithConfig(Stream **stream, uint32_t priority, uint32_t flag) {
    NEED_CONTEXT;
    pthread_t thread;
    Stream *made = calloc(1, sizeof *made);
    made->device = current, made->last = &made->first;
    LOCKED(made->next = streams; streams = made);
    pthread_create(&thread, NULL, serve, made);
    pthread_detach(thread);
    return *stream = made, OK;
}
int aclrtCreateStream(Stream **stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
int aclrtDestroyStream(Stream *stream) {
    LOCKED(stream->is_destroyed = 1; stream->is_held = 0; pthread_cond_broadcast(&changed));
    return OK;
}
int aclrtDestroyStreamForce(Stream *stream) { return aclrtDestroyStream(stream); }
static int give(Stream *stream, Task given) {
    NEED_CONTEXT;
    if (stream->device != current) return OTHER_CONTEXT;
    Task *task = malloc(sizeof *task);
    *task = given;
    pthread_mutex_lock(&lock);
    if (task->event) task->event->uses++;
    if (task->kind == RECORD) task->event->recorded++;
    if (task->event) task->record = task->event->recorded;
    *stream->last = task, stream->last = &task->next;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return OK;
}
static int is_working(Stream *stream) { return stream->first || stream->is_busy; }
int aclrtStreamQuery(Stream *stream, int *is_behind) {
    NEED_CONTEXT;
    LOCKED(*is_behind = is_working(stream));
    return OK;
}
int aclrtSynchronizeStream(Stream *stream) {
    NEED_CONTEXT;
    LOCKED(while (is_working(stream)) pthread_cond_wait(&changed, &lock));
    return OK;
}
int aclrtSynchronizeStreamWithTimeout(Stream *stream, int timeout) { return aclrtSynchronizeStream(stream); }
int aclrtSynchronizeDevice(void) {
    NEED_CONTEXT;
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == current) aclrtSynchronizeStream(stream);
    return OK;
}
int aclrtSynchronizeDeviceWithTimeout(int timeout) { return aclrtSynchronizeDevice(); }
int host_hold(Stream *stream, int is_held) {
    LOCKED(stream->is_held = is_held; pthread_cond_broadcast(&changed));
    return OK;
}

int host_break(int code) { return broken = code, OK; }

/* Copies */

static int is_bad_copy(const void *target, const void *source, size_t size, int kind) {
    int is_to_device = kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE;
    int is_from_device = kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE;
    int is_bad;
    LOCKED(is_bad = !block_of(target, size) == is_to_device || !block_of(source, size) == is_from_device);
    return is_bad;
}
int aclrtMemcpy(void *target, size_t space, const void *source, size_t size, int kind) {
    NEED_CONTEXT;
    if (size > space || is_bad_copy(target, source, size, kind)) return BAD_ARGUMENT;
    return memcpy(target, source, size), OK;
}
int aclrtMemcpyAsync(void *target, size_t space, const void *source, size_t size, int kind, Stream *stream) {
    if (size > space || is_bad_copy(target, source, size, kind)) return BAD_ARGUMENT;
    return give(stream, (Task){.kind = COPY, .target = target, .source = source, .size = size});
}

/* Events */

int aclrtCreateEventExWithFlag(Event **event, uint32_t flag) {
    NEED_CONTEXT;
    *event = calloc(1, sizeof **event);
    return (*event)->device = current, OK;
}
int aclrtCreateEventWithFlag(Event **event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
int aclrtDestroyEvent(Event *event) {
    LOCKED(event->is_destroyed = 1; if (!event->uses) free(event));
    return OK;
}
int aclrtRecordEvent(Event *event, Stream *stream) { return give(stream, (Task){.kind = RECORD, .event = event}); }
int aclrtStreamWaitEvent(Stream *stream, Event *event) { return give(stream, (Task){.kind = WAIT, .event = event}); }
int aclrtQueryEventStatus(Event *event, int *is_passed) {
    NEED_CONTEXT;
    LOCKED(*is_passed = event->done == event->recorded);
    return OK;
}
int aclrtSynchronizeEvent(Event *event) {
    NEED_CONTEXT;
    LOCKED(while (event->done < event->recorded) pthread_cond_wait(&changed, &lock));
    return OK;
}
int aclrtEventElapsedTime(float *ms, Event *start, Event *end) {
    return *ms = (float)(end->passed_ms - start->passed_ms), OK;
}
