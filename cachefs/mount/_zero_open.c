/* Zero-open: give FUSE handlers the inode of a READ or READDIRPLUS that carries no file handle.
 * And answer, and count, what needs no look into a dataset: ioctls, and extended attributes of other owners.
 *
 * A mount that answers the first OPEN (OPENDIR) with ENOSYS is never sent OPEN, FLUSH or RELEASE again, and every read
 * then arrives with fi->fh == 0. pyfuse3 hands its handlers fi->fh and not the inode. This object is loaded with
 * RTLD_GLOBAL before pyfuse3, so that pyfuse3's call of fuse_session_new lands here; it passes libfuse a copy of
 * pyfuse3's operations in which read and readdirplus first store the inode in fi->fh.
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fuse_lowlevel.h>
#include <stddef.h>
#include <string.h>

static struct fuse_lowlevel_ops theirs, ours;

static void read_by_inode(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi) {
    fi->fh = ino;
    theirs.read(req, ino, size, off, fi);
}

static void readdirplus_by_inode(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi) {
    fi->fh = ino;
    theirs.readdirplus(req, ino, size, off, fi);
}

static int (*reply_error)(fuse_req_t, int);

/* What was answered here in this process, for its counters. */
static unsigned long ioctls, foreign_attributes;

/* Python's open() asks isatty() of each file before 3.14. libfuse would answer the same, and count nothing. */
static void count_ioctl(fuse_req_t req, fuse_ino_t ino, int cmd, void *arg, struct fuse_file_info *fi, unsigned flags,
                        const void *in, size_t in_size, size_t out_size) {
    (void)ino, (void)cmd, (void)arg, (void)fi, (void)flags, (void)in, (void)in_size, (void)out_size;
    ioctls++;
    reply_error(req, ENOSYS);
}

/* `ls -l` asks for two attributes of other owners per file, and some kernels' overlayfs for one. */
static void getxattr_of_ours(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size) {
    static const char prefix[] = "user.cachefs.";
    if (!strncmp(name, prefix, sizeof prefix - 1)) {
        theirs.getxattr(req, ino, name, size);
        return;
    }
    foreign_attributes++;
    reply_error(req, ENODATA);
}

static void *real(const char *name);

static const struct fuse_lowlevel_ops *interpose(const struct fuse_lowlevel_ops *op, size_t size) {
    memcpy(&theirs, op, size < sizeof theirs ? size : sizeof theirs);
    ours = theirs;
    if (ours.read) ours.read = read_by_inode;
    if (ours.readdirplus) ours.readdirplus = readdirplus_by_inode;
    reply_error = real("fuse_reply_err");
    if (reply_error && !ours.ioctl) ours.ioctl = count_ioctl;
    if (reply_error && ours.getxattr) ours.getxattr = getxattr_of_ours;
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

/* Several processes wait for requests on descriptors that do not block, and one gets each. pyfuse3 takes EAGAIN for a
 * failure and EINTR for what it is: nothing there yet. */
int session_receive_buf(struct fuse_session *, struct fuse_buf *) __asm__("fuse_session_receive_buf");
int session_receive_buf(struct fuse_session *session, struct fuse_buf *buf) {
    static int (*receive)(struct fuse_session *, struct fuse_buf *);
    if (!receive) receive = real("fuse_session_receive_buf");
    int got = receive ? receive(session, buf) : -ENOSYS;
    return got == -EAGAIN ? -EINTR : got;
}

/* For the loader's self-test: were pyfuse3's operations really interposed? */
int cachefs_zero_open_active(void) { return ours.read == read_by_inode; }

unsigned long cachefs_ioctls(void) { return ioctls; }
unsigned long cachefs_foreign_attributes(void) { return foreign_attributes; }
