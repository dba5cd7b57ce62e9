/* Library for LD_PRELOAD: read and write (FAULT_CALL) fail, are cut short or hang for files whose path contains
   FAULT_PATH. With FAULT_LOG, each such call of any process adds a byte to that file, and the first FAULT_AFTER of them
   work. FAULT_CALL=list: listings lack the name FAULT_PATH, as those of a cache that is out of date. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Returns whether the calls that may work are over, and counts this one. */
static int is_due(void) {
  const char *log = getenv("FAULT_LOG"), *after = getenv("FAULT_AFTER");
  struct stat found;
  if (!log) return 1;
  int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return 1;
  syscall(SYS_write, fd, ".", 1);
  int due = fstat(fd, &found) || !after || found.st_size > atol(after);
  close(fd);
  return due;
}

static int hits(int fd, const char *call) {
  const char *wanted = getenv("FAULT_CALL"), *part = getenv("FAULT_PATH");
  char link[64], path[4096];
  if (!wanted || !part || strcmp(wanted, call)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return strstr(path, part) != NULL && is_due();
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

ssize_t writev(int fd, const struct iovec *parts, int count) {
  static ssize_t (*real)(int, const struct iovec *, int);
  if (!real) real = dlsym(RTLD_NEXT, "writev");
  if (count && hits(fd, "write")) {
    struct iovec first = parts[0];
    ssize_t left = allowed(first.iov_len);
    if (left < 0) return -1;
    first.iov_len = left;
    return real(fd, &first, 1);
  }
  return real(fd, parts, count);
}

static int is_hidden(const char *name) {
  const char *wanted = getenv("FAULT_CALL"), *hidden = getenv("FAULT_PATH");
  return wanted && hidden && !strcmp(wanted, "list") && !strcmp(name, hidden);
}

#define LIST(name, entry)                                        \
  struct entry *name(DIR *folder) {                              \
    static struct entry *(*real)(DIR *);                         \
    struct entry *found;                                         \
    if (!real) real = dlsym(RTLD_NEXT, #name);                   \
    do found = real(folder); while (found && is_hidden(found->d_name)); \
    return found;                                                \
  }

LIST(readdir, dirent)
LIST(readdir64, dirent64)
