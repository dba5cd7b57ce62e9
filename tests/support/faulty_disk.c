/* Library for LD_PRELOAD: read and write fail, are cut short or hang for files whose path contains FAULT_PATH. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int hits(int fd, const char *call) {
  const char *wanted = getenv("FAULT_CALL"), *part = getenv("FAULT_PATH");
  char link[64], path[4096];
  if (!wanted || !part || strcmp(wanted, call)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return strstr(path, part) != NULL;
}

/* Returns the number of bytes to transfer, or -1 with errno. */
static ssize_t allowed(size_t count) {
  const char *error = getenv("FAULT_ERRNO"), *seconds = getenv("FAULT_SECONDS");
  if (seconds) sleep(atoi(seconds));
  if (error) { errno = atoi(error); return -1; }
  return seconds ? (ssize_t)count : (ssize_t)((count + 1) / 2);
}

#define WRAP(name, call, pointer, ...)                                          \
  ssize_t name(int fd, pointer data, size_t count __VA_OPT__(, off_t at)) {     \
    static ssize_t (*real)(int, pointer, size_t __VA_OPT__(, off_t));           \
    if (!real) real = dlsym(RTLD_NEXT, #name);                                  \
    if (hits(fd, call)) {                                                       \
      ssize_t left = allowed(count);                                            \
      if (left < 0) return -1;                                                  \
      count = left;                                                             \
    }                                                                           \
    return real(fd, data, count __VA_OPT__(, at));                              \
  }

WRAP(read, "read", void *)
WRAP(pread, "read", void *, offset)
WRAP(pread64, "read", void *, offset)
WRAP(write, "write", const void *)
WRAP(pwrite, "write", const void *, offset)
WRAP(pwrite64, "write", const void *, offset)
