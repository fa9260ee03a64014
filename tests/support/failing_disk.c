/* Makes calls of the C library on chosen paths slow, or fail, as a file system in trouble does.

   Preloaded into a program by LD_PRELOAD. The environment variable FAILING_DISK names a file of
   rules, which is read at each call, so a test can begin and end a fault while the program runs.
   Each line of the file is a rule:

       CALL ERRNO DELAY_MS PATTERN

   CALL is open, rename, rmdir, fsync or write. "open" stands for opening for writing. The rule
   applies to absolute paths that fnmatch(3) the pattern. A call sleeps for DELAY_MS, and then fails
   with ERRNO if it is not 0. Each such call appends a byte to the file with the suffix .hits beside
   the rules. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long read_rules(char *text, long size) {
    const char *file = getenv("FAILING_DISK");
    if (!file) return 0;
    long handle = syscall(SYS_openat, AT_FDCWD, file, O_RDONLY | O_CLOEXEC, 0);
    if (handle < 0) return 0;
    long count = syscall(SYS_read, handle, text, size - 1);
    syscall(SYS_close, handle);
    if (count < 0) count = 0;
    text[count] = 0;
    return count;
}

static void record_hit(void) {
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s.hits", getenv("FAILING_DISK"));
    long handle = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (handle < 0) return;
    syscall(SYS_write, handle, "x", 1);
    syscall(SYS_close, handle);
}

static void path_of_handle(int handle, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void absolute(int folder, const char *name, char *path) {
    char base[PATH_MAX];
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    if (folder != AT_FDCWD) path_of_handle(folder, base);
    else if (!getcwd(base, sizeof base)) base[0] = 0;
    if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) path[0] = 0;
}

/* Returns 0, or the errno with which a call has to fail. */
static int fault(const char *call, const char *path) {
    char text[4096], *rest = text, *line;
    int saved = errno, found = 0;
    if (read_rules(text, sizeof text)) {
        while ((line = strsep(&rest, "\n"))) {
            char name[16], pattern[1024];
            int code, delay_ms;
            if (sscanf(line, "%15s %d %d %1023s", name, &code, &delay_ms, pattern) != 4) continue;
            if (strcmp(name, call) || fnmatch(pattern, path, 0)) continue;
            record_hit();
            struct timespec delay = {delay_ms / 1000, delay_ms % 1000 * 1000000L};
            nanosleep(&delay, NULL);
            found = code;
            break;
        }
    }
    errno = saved;
    return found;
}

static int fault_at(const char *call, int folder, const char *name) {
    char path[PATH_MAX];
    absolute(folder, name, path);
    return fault(call, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_IF(code) do { int found = (code); if (found) { errno = found; return -1; } } while (0)
#define IS_WRITTEN(flags) ((flags) & (O_WRONLY | O_RDWR))
#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); \
    }

int open(const char *name, int flags, ...) {
    MODE(flags)
    if (IS_WRITTEN(flags)) FAIL_IF(fault_at("open", AT_FDCWD, name));
    return NEXT(open)(name, flags, mode);
}

int open64(const char *name, int flags, ...) {
    MODE(flags)
    if (IS_WRITTEN(flags)) FAIL_IF(fault_at("open", AT_FDCWD, name));
    return NEXT(open64)(name, flags, mode);
}

int openat(int folder, const char *name, int flags, ...) {
    MODE(flags)
    if (IS_WRITTEN(flags)) FAIL_IF(fault_at("open", folder, name));
    return NEXT(openat)(folder, name, flags, mode);
}

int openat64(int folder, const char *name, int flags, ...) {
    MODE(flags)
    if (IS_WRITTEN(flags)) FAIL_IF(fault_at("open", folder, name));
    return NEXT(openat64)(folder, name, flags, mode);
}

int rename(const char *from, const char *to) {
    FAIL_IF(fault_at("rename", AT_FDCWD, to));
    return NEXT(rename)(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    FAIL_IF(fault_at("rename", to_folder, to));
    return NEXT(renameat)(from_folder, from, to_folder, to);
}

int rmdir(const char *name) {
    FAIL_IF(fault_at("rmdir", AT_FDCWD, name));
    return NEXT(rmdir)(name);
}

int unlinkat(int folder, const char *name, int flags) {
    if (flags & AT_REMOVEDIR) FAIL_IF(fault_at("rmdir", folder, name));
    return NEXT(unlinkat)(folder, name, flags);
}

static int fault_of_handle(const char *call, int handle) {
    char path[PATH_MAX];
    path_of_handle(handle, path);
    return fault(call, path);
}

int fsync(int handle) {
    FAIL_IF(fault_of_handle("fsync", handle));
    return NEXT(fsync)(handle);
}

ssize_t write(int handle, const void *bytes, size_t count) {
    FAIL_IF(fault_of_handle("write", handle));
    return NEXT(write)(handle, bytes, count);
}
