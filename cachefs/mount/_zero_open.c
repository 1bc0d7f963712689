/* What a mount needs of libfuse and what pyfuse3 does not pass on. It also answers, and counts, ioctls, which need no
 * look into a dataset.
 *
 * Zero-open: a mount that answers the first OPEN (OPENDIR) with ENOSYS is never sent OPEN, FLUSH or RELEASE again, and
 * every read then arrives with fi->fh == 0. pyfuse3 hands its handlers fi->fh and not the inode; here the inode of a
 * READ or READDIRPLUS is put into fi->fh first. Also what the kernel says of itself when it greets the mount, how many
 * requests it may have under way, which thread reads, and a note of each request that is taken, for the supervisor (cachefs.mount.processes.worker_pool).
 *
 * This object is loaded with RTLD_GLOBAL before pyfuse3, so that pyfuse3's calls of libfuse land here; fuse_session_new
 * passes libfuse a copy of pyfuse3's operations, some of which are replaced.
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fuse_lowlevel.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

static struct fuse_lowlevel_ops theirs, ours;

/* Nearly every read is a "background" request: one that the kernel's readahead sends. Of these the kernel has 12 under
 * way at once unless it is told otherwise, and a read of another file waits behind them. */
#define MOST_UNDER_WAY 2048

static unsigned kernel_can; /* FUSE_CAP_... bits of the kernel */

static void init_and_ask(void *userdata, struct fuse_conn_info *conn) {
    theirs.init(userdata, conn);
    kernel_can = conn->capable;
    conn->max_background = MOST_UNDER_WAY;
    conn->congestion_threshold = MOST_UNDER_WAY;
}

unsigned cachefs_kernel_can(void) { return kernel_can; }

static const struct fuse_ctx *(*context_of)(fuse_req_t);

/* The thread that has sent the read, or the listing, which is being handed to pyfuse3, by its number in the mount's pid
 * namespace; 0 where it has none there. pyfuse3 begins its handler before it takes another request. */
int cachefs_reading_thread;

static void read_by_inode(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi) {
    fi->fh = ino;
    if (context_of) cachefs_reading_thread = context_of(req)->pid;
    theirs.read(req, ino, size, off, fi);
}

static void readdirplus_by_inode(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi) {
    fi->fh = ino;
    if (context_of) cachefs_reading_thread = context_of(req)->pid;
    theirs.readdirplus(req, ino, size, off, fi);
}

static int (*reply_error)(fuse_req_t, int);

/* What was answered here in this process, for its counters. */
static unsigned long ioctls;

/* Python's open() asks isatty() of each file before 3.14. libfuse would answer the same, and count nothing. */
static void count_ioctl(fuse_req_t req, fuse_ino_t ino, int cmd, void *arg, struct fuse_file_info *fi, unsigned flags,
                        const void *in, size_t in_size, size_t out_size) {
    (void)ino, (void)cmd, (void)arg, (void)fi, (void)flags, (void)in, (void)in_size, (void)out_size;
    ioctls++;
    reply_error(req, ENOSYS);
}

static void *real(const char *name);

static const struct fuse_lowlevel_ops *interpose(const struct fuse_lowlevel_ops *op, size_t size) {
    memcpy(&theirs, op, size < sizeof theirs ? size : sizeof theirs);
    ours = theirs;
    if (ours.init) ours.init = init_and_ask;
    if (ours.read) ours.read = read_by_inode;
    if (ours.readdirplus) ours.readdirplus = readdirplus_by_inode;
    reply_error = real("fuse_reply_err");
    context_of = real("fuse_req_ctx");
    if (reply_error && !ours.ioctl) ours.ioctl = count_ioctl;
    return &ours;
}

/* RTLD_NEXT does not see libfuse3: pyfuse3's module was loaded RTLD_LOCAL. Its libfuse3 is loaded by the time we are called. */
static void *real(const char *name) {
    static const char *const sonames[] = {"libfuse3.so.4", "libfuse3.so.3"};
    for (size_t i = 0; i < sizeof sonames / sizeof *sonames; i++) {
        void *library = dlopen(sonames[i], RTLD_LAZY | RTLD_NOLOAD);
        void *symbol = library ? dlsym(library, name) : NULL;
        if (symbol) return symbol;
    }
    return NULL;
}

static size_t known_size(size_t size) { return size < sizeof ours ? size : sizeof ours; }

/* The names are given to the assembler, since libfuse 3.17's header makes fuse_session_new a macro or an inline function. */
struct fuse_session *session_new(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *) __asm__("fuse_session_new");
struct fuse_session *session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t size, void *userdata) {
    struct fuse_session *(*create)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *) = real("fuse_session_new");
    return create ? create(args, interpose(op, size), known_size(size), userdata) : NULL;
}

struct fuse_session *session_new_versioned(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *, void *) __asm__("fuse_session_new_versioned");
struct fuse_session *session_new_versioned(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t size, void *version, void *userdata) {
    struct fuse_session *(*create)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *, void *) = real("fuse_session_new_versioned");
    return create ? create(args, interpose(op, size), known_size(size), version, userdata) : NULL;
}

/* What one mount's supervisor and its workers share (cachefs.mount.processes.worker_pool): the requests that no worker takes any more, and
 * for each worker the request that it took last. */
#define CONDEMNED 8
static uint64_t *blame; /* numbers of CONDEMNED requests, then one for each worker */
static unsigned worker;

void cachefs_note_requests(void *page, unsigned number) {
    blame = page;
    worker = number;
}

/* The beginning of a request (struct fuse_in_header), and an answer without content (struct fuse_out_header). */
struct request { uint32_t length, opcode; uint64_t number; };
struct answer { uint32_t length; int32_t error; uint64_t number; };
#define HANDED_OUT_AGAIN (UINT64_C(1) << 63) /* a flag in the number of a request */

/* Takes note of a request; answers it with EIO where it is condemned. */
static int is_condemned(struct fuse_session *session, const struct fuse_buf *buf, int got) {
    struct request request;
    if (!blame || got < (int) sizeof request || buf->flags & FUSE_BUF_IS_FD) return 0;
    memcpy(&request, buf->mem, sizeof request);
    uint64_t number = request.number & ~HANDED_OUT_AGAIN;
    for (int i = 0; number && i < CONDEMNED; i++)
        if (__atomic_load_n(&blame[i], __ATOMIC_RELAXED) == number) {
            struct answer answer = {sizeof answer, -EIO, request.number};
            int (*descriptor)(struct fuse_session *) = real("fuse_session_fd");
            /* Nobody is left to tell where this fails: the request is gone. */
            if (descriptor && write(descriptor(session), &answer, sizeof answer) < 0) return 1;
            return 1;
        }
    __atomic_store_n(&blame[CONDEMNED + worker], number, __ATOMIC_RELAXED);
    return 0;
}

/* Several processes wait for requests on descriptors that do not block, and one gets each. pyfuse3 takes EAGAIN for a
 * failure and EINTR for what it is: nothing there yet. */
int session_receive_buf(struct fuse_session *, struct fuse_buf *) __asm__("fuse_session_receive_buf");
int session_receive_buf(struct fuse_session *session, struct fuse_buf *buf) {
    static int (*receive)(struct fuse_session *, struct fuse_buf *);
    if (!receive) receive = real("fuse_session_receive_buf");
    int got = receive ? receive(session, buf) : -ENOSYS;
    if (got > 0 && is_condemned(session, buf, got)) return -EINTR;
    return got == -EAGAIN ? -EINTR : got;
}

/* For the loader's self-test: were pyfuse3's operations really interposed? */
int cachefs_zero_open_active(void) { return ours.read == read_by_inode; }

unsigned long cachefs_ioctls(void) { return ioctls; }
