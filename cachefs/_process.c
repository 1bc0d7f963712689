/* What `cachefs run` does in a Python process that Python itself cannot (see cachefs/_process.pyi):
 *
 * start(path, arguments, environment, descriptors) runs a program that is no child of this process. An ordinary child
 * that ends sends SIGCHLD, and a job that waits for any child would reap it. So a process is cloned that sends no
 * signal and that waitpid(-1) does not see, which starts the program and ends at once. Both share this process's memory
 * and suspend this thread until the program has begun, as vfork(2) does, so that it costs the same however large the
 * job is. The kernel then gives the program to the nearest subreaper, or to the first process of the pid namespace. Where
 * the job is that process itself, as in a container without an init, the program is its child all the same.
 *
 * spare_isatty() has Python's own code, and no other, ask fstat(2) before isatty(3). Before Python 3.14, open() calls
 * isatty() for each file. That is an ioctl, and FUSE sends every ioctl to the mount's process. A regular file is no
 * terminal, and fstat tells so without leaving the kernel. The address that Python's code jumps to for isatty is
 * replaced; nothing is put into the environment, so no program that Python starts is concerned.
 *
 * The module is loaded into Pythons of any libc. It is linked to none (-nostdlib): what it takes from Python's own libc
 * has the same name and meaning in glibc, of any version, and in musl.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>


#define STACK (64 * 1024) /* bytes for each of the two processes until the program has begun */
#define LAST_SIGNAL 64
#define CLOSE_ON_EXEC 4 /* CLOSE_RANGE_CLOEXEC */
#define LENGTH_AT 16 /* of an entry of getdents64: its length, and its name */
#define NAME_AT 19
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

/* --- a program that is no child ---------------------------------------------------------------------------------- */

struct program {
    const char *path;
    char **arguments;
    char **environment;
    const int *descriptors; /* that it gets, under the same numbers; ends with -1 */
    char *stack;
    volatile int number; /* of its process */
    volatile int error;
};

/* Has exec close all descriptors but the first three. Linux before 5.11 lacks the call or its flag, and a filter of
 * system calls may refuse it: then each descriptor that /proc names is marked. Nothing here takes memory, since other
 * threads of the job share it. Returns -1 where neither can be done. */
static int close_all_on_exec(void) {
    char entries[4096];
    if (!syscall(SYS_close_range, 3, ~0U, CLOSE_ON_EXEC)) {
        return 0;
    }
    int listed = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (listed < 0) {
        return -1;
    }
    long size;
    while ((size = syscall(SYS_getdents64, listed, entries, sizeof entries)) > 0) {
        for (long at = 0; at < size;) {
            unsigned short length;
            memcpy(&length, entries + at + LENGTH_AT, sizeof length);
            int fd = 0;
            const char *name = entries + at + NAME_AT;
            for (; '0' <= *name && *name <= '9'; name++) {
                fd = 10 * fd + *name - '0';
            }
            if (!*name && fd > 2 && fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
                return -1;
            }
            at += length;
        }
    }
    return size < 0 ? -1 : 0;
}

/* The process that becomes the program: in a session of its own, with nothing of the job's open. */
static int become(void *given) {
    struct program *program = given;
    for (int number = 1; number <= LAST_SIGNAL; number++) {
        if (signal(number, SIG_DFL) == SIG_IGN) {
            signal(number, SIG_IGN);
        }
    }
    sigset_t none;
    sigemptyset(&none);
    setsid();
    int null = open("/dev/null", O_RDWR);
    if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0) {
        goto failed;
    }
    if (close_all_on_exec() < 0) {
        goto failed;
    }
    for (const int *fd = program->descriptors; *fd >= 0; fd++) {
        if (fcntl(*fd, F_SETFD, 0) < 0) {
            goto failed;
        }
    }
    sigprocmask(SIG_SETMASK, &none, NULL);
    execve(program->path, program->arguments, program->environment);
failed:
    program->error = errno;
    _exit(127);
}

/* The process between: this one's child, which nothing sees, and the program's parent for a moment. */
static int between(void *given) {
    struct program *program = given;
    program->number = clone(become, program->stack + STACK, CLONE_VM | CLONE_VFORK | SIGCHLD, program);
    if (program->number < 0) {
        program->error = errno;
    }
    _exit(0);
}

static void run(struct program *program) {
    sigset_t all, before;
    sigfillset(&all);
    program->stack = mmap(NULL, 2 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (program->stack == MAP_FAILED) {
        program->error = errno;
        return;
    }
    sigprocmask(SIG_SETMASK, &all, &before); /* no handler of the job may run in a process that shares its memory */
    int child = clone(between, program->stack + 2 * STACK, CLONE_VM | CLONE_VFORK, program);
    if (child < 0) {
        program->error = errno;
    } else {
        while (waitpid(child, NULL, __WCLONE) < 0 && errno == EINTR) {
        }
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    munmap(program->stack, 2 * STACK);
}

/* The texts of a tuple of bytes, with NULL behind the last; NULL with an exception where it is none. */
static char **texts_of(PyObject *tuple) {
    Py_ssize_t count = PyTuple_Size(tuple);
    char **texts = count < 0 ? NULL : PyMem_Calloc(count + 1, sizeof *texts);
    for (Py_ssize_t at = 0; texts && at < count; at++) {
        texts[at] = PyBytes_AsString(PyTuple_GetItem(tuple, at));
        if (!texts[at]) {
            PyMem_Free(texts);
            return NULL;
        }
    }
    return texts;
}

static PyObject *start(PyObject *module, PyObject *given) {
    PyObject *arguments, *environment;
    const char *path;
    int descriptors[5] = {-1, -1, -1, -1, -1};
    (void)module;
    if (!PyArg_ParseTuple(given, "yOO(iiii)", &path, &arguments, &environment, descriptors, descriptors + 1,
                          descriptors + 2, descriptors + 3)) {
        return NULL;
    }
    struct program program = {.path = path, .descriptors = descriptors};
    program.arguments = texts_of(arguments);
    program.environment = program.arguments ? texts_of(environment) : NULL;
    if (program.environment) {
        run(&program);
        if (program.error) {
            errno = program.error;
            PyErr_SetFromErrno(PyExc_OSError);
        }
    }
    PyMem_Free(program.arguments);
    PyMem_Free(program.environment);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(program.number);
}

/* --- isatty ------------------------------------------------------------------------------------------------------ */

#define REGULAR 0100000
#define KIND 0170000

#if defined(__x86_64__)
#define IS_ADDRESS(type) ((type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_JUMP_SLOT)
#elif defined(__aarch64__)
#define IS_ADDRESS(type) ((type) == R_AARCH64_GLOB_DAT || (type) == R_AARCH64_JUMP_SLOT)
#else
#define IS_ADDRESS(type) 0
#endif

static int (*theirs)(int);

static int ours(int fd) {
    struct stat found; /* the same as the kernel has, on machines of 64 bits */
    int before = errno;
    if (!syscall(SYS_fstat, fd, &found) && (found.st_mode & KIND) == REGULAR) {
        errno = ENOTTY;
        return 0;
    }
    errno = before;
    return theirs(fd);
}

struct object {
    ElfW(Addr) begin; /* where it was loaded, relative to what its file says */
    ElfW(Addr) relro, relro_end; /* what was made read-only once it was loaded */
    const char *names;
    const ElfW(Sym) *symbols;
};

static void replace_in(const struct object *object, const ElfW(Rela) *entry, size_t size) {
    long page = sysconf(_SC_PAGESIZE);
    for (const ElfW(Rela) *end = (const void *)((const char *)entry + size); entry < end; entry++) {
        const char *name = object->names + object->symbols[ELF64_R_SYM(entry->r_info)].st_name;
        if (!IS_ADDRESS(ELF64_R_TYPE(entry->r_info)) || strcmp(name, "isatty")) {
            continue;
        }
        ElfW(Addr) place = object->begin + entry->r_offset;
        char *first = (char *)(place & -(ElfW(Addr))page);
        if (mprotect(first, page, PROT_READ | PROT_WRITE)) {
            continue;
        }
        __atomic_store_n((int (**)(int))place, ours, __ATOMIC_RELEASE);
        if (object->relro <= place && place < object->relro_end) {
            mprotect(first, page, PROT_READ);
        }
    }
}

static int look_at(struct dl_phdr_info *info, size_t size, void *of_python) {
    struct object object = {.begin = info->dlpi_addr};
    const ElfW(Dyn) *dynamic = NULL;
    int is_python = 0;
    (void)size;
    for (int at = 0; at < info->dlpi_phnum; at++) {
        const ElfW(Phdr) *part = info->dlpi_phdr + at;
        ElfW(Addr) first = object.begin + part->p_vaddr;
        if (part->p_type == PT_DYNAMIC) {
            dynamic = (const void *)first;
        } else if (part->p_type == PT_GNU_RELRO) {
            object.relro = first;
            object.relro_end = first + part->p_memsz;
        } else if (part->p_type == PT_LOAD) {
            is_python |= first <= (ElfW(Addr))of_python && (ElfW(Addr))of_python < first + part->p_memsz;
        }
    }
    if (!is_python || !dynamic) {
        return 0;
    }
    ElfW(Addr) tables[2] = {0, 0};
    size_t sizes[2] = {0, 0};
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        /* glibc writes addresses in there as the object is loaded, and musl does not. */
        ElfW(Addr) address = dynamic->d_un.d_ptr + (dynamic->d_un.d_ptr < object.begin ? object.begin : 0);
        switch (dynamic->d_tag) {
        case DT_STRTAB: object.names = (const void *)address; break;
        case DT_SYMTAB: object.symbols = (const void *)address; break;
        case DT_JMPREL: tables[0] = address; break;
        case DT_RELA: tables[1] = address; break;
        case DT_PLTRELSZ: sizes[0] = dynamic->d_un.d_val; break;
        case DT_RELASZ: sizes[1] = dynamic->d_un.d_val; break;
        }
    }
    for (int at = 0; at < 2; at++) {
        if (tables[at] && object.names && object.symbols) {
            replace_in(&object, (const void *)tables[at], sizes[at]);
        }
    }
    return 1;
}

static PyObject *spare_isatty(PyObject *module, PyObject *nothing) {
    (void)module;
    (void)nothing;
    theirs = (int (*)(int))dlsym(RTLD_DEFAULT, "isatty");
    if (theirs && sizeof(void *) == 8) {
        dl_iterate_phdr(look_at, (void *)PyFloat_AsDouble);
    }
    Py_RETURN_NONE;
}

/* --- the module -------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"start", start, METH_VARARGS, "Runs a program that is no child. Returns its process number; raises OSError."},
    {"spare_isatty", spare_isatty, METH_NOARGS, "Has Python's own code ask fstat before isatty."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_process", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__process(void) { return PyModuleDef_Init(&definition); }
