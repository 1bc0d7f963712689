/* isatty(3) that asks fstat(2) first, for programs that `cachefs run` starts (see cachefs/preload.py).
 *
 * Before Python 3.14, open() calls isatty() for each file. That is an ioctl, and FUSE sends every ioctl to the mount's
 * process. A regular file is no terminal, and fstat tells so without leaving the kernel.
 *
 * The object is loaded into programs of any kind. So it needs no library at all (it is linked with -nostdlib): what it
 * takes from the program's own libc has the same name and meaning in glibc, of any version, and in musl.
 */
#define _GNU_SOURCE
#include <asm/stat.h>
#include <asm/unistd.h>
#include <dlfcn.h>
#include <errno.h>

#define REGULAR 0100000
#define KIND 0170000
#define GET_TERMINAL 0x5401 /* TCGETS */

extern long syscall(long number, ...);
/* Absent from the libc of glibc before 2.34, unless the program has loaded libdl. */
extern void *dlsym(void *restrict, const char *restrict) __attribute__((weak));

__attribute__((visibility("default"))) int isatty(int fd) {
    struct stat found;
    int before = errno;
    if (!syscall(__NR_fstat, fd, &found) && (found.st_mode & KIND) == REGULAR) {
        errno = ENOTTY;
        return 0;
    }
    errno = before;
    int (*next)(int) = dlsym ? (int (*)(int))dlsym(RTLD_NEXT, "isatty") : 0;
    char terminal[256]; /* struct termios of the kernel, which is smaller on every machine */
    return next ? next(fd) : !syscall(__NR_ioctl, fd, GET_TERMINAL, terminal);
}
