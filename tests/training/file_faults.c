/* Faults in the file operations of a process, for tests.

   gcc -shared -fPIC -O1 -o file_faults.so file_faults.c -ldl
   LD_PRELOAD=./file_faults.so program

   After file_faults_arm(folder, kind, number, count), the operations that write
   below the folder are counted from 1, and those from `number` on, `count` of
   them, are faulty:
     kind 0: none;
     kind 1: the process kills itself, in the middle of a write;
     otherwise: the operation fails, and errno is the kind.
   Removing and renaming never fail. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[4096];
static int kind, first, how_many, counter;

void file_faults_arm(const char *path, int new_kind, int number, int count) {
  strncpy(folder, path, sizeof folder - 1);
  kind = new_kind;
  first = number;
  how_many = count;
  counter = 0;
}

int file_faults_count(void) { return counter; }

enum { GO_ON, FAIL, DIE };

static int decide(const char *path, int may_fail) {
  if (!folder[0] || !path || strncmp(path, folder, strlen(folder))) {
    return GO_ON;
  }
  int number = __sync_add_and_fetch(&counter, 1);
  if (!kind || number < first || number >= first + how_many) return GO_ON;
  if (kind == 1) return DIE;
  if (!may_fail) return GO_ON;
  errno = kind;
  return FAIL;
}

static int decide_descriptor(int descriptor) {
  char link[64], path[4096];
  if (!folder[0] || descriptor < 3) return GO_ON;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return GO_ON;
  path[size] = 0;
  return decide(path, 1);
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

#define REAL(result, name, ...)                     \
  static result (*real)(__VA_ARGS__);               \
  if (!real) real = dlsym(RTLD_NEXT, #name)

#define ON_PATH(name, parameters, arguments, path, may_fail) \
  int name parameters {                                      \
    static int(*real) parameters;                            \
    if (!real) real = dlsym(RTLD_NEXT, #name);               \
    int fault = decide(path, may_fail);                      \
    if (fault == DIE) die();                                 \
    return fault == FAIL ? -1 : real arguments;              \
  }

ON_PATH(rename, (const char *a, const char *b), (a, b), b, 0)
ON_PATH(unlink, (const char *a), (a), a, 0)
ON_PATH(rmdir, (const char *a), (a), a, 0)
ON_PATH(mkdir, (const char *a, mode_t m), (a, m), a, 1)

#define OPEN(name)                                                  \
  int name(const char *path, int flags, ...) {                      \
    REAL(int, name, const char *, int, ...);                        \
    va_list rest;                                                   \
    va_start(rest, flags);                                          \
    mode_t mode = va_arg(rest, mode_t);                             \
    va_end(rest);                                                   \
    int fault = flags & (O_CREAT | O_TRUNC) ? decide(path, 1) : GO_ON; \
    if (fault == DIE) die();                                        \
    return fault == FAIL ? -1 : real(path, flags, mode);            \
  }

OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  int fault = decide_descriptor(fd);
  if (fault == DIE) {
    real(fd, data, size / 2);
    die();
  }
  return fault == FAIL ? -1 : real(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
  int fault = decide_descriptor(fd);
  if (fault == DIE) {
    real(fd, data, size / 2, offset);
    die();
  }
  return fault == FAIL ? -1 : real(fd, data, size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  return pwrite64(fd, data, size, offset);
}

#define ON_DESCRIPTOR(name)                    \
  int name(int fd) {                           \
    REAL(int, name, int);                      \
    int fault = decide_descriptor(fd);         \
    if (fault == DIE) die();                   \
    return fault == FAIL ? -1 : real(fd);      \
  }

ON_DESCRIPTOR(fsync)
ON_DESCRIPTOR(fdatasync)
