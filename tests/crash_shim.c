/* crash_shim.c - a library to preload (LD_PRELOAD) that counts what a program changes (or reads) below one folder,
 * call by call, writes it down, and at one of the calls ends the process, lets the call fail, or has a signal come.
 * tests/test_crash.sh and tests/test_signals.sh drive it, by the environment:
 *   CRASH_FOLDER  absolute; only calls with an absolute path, or on a file open for writing, below it count
 *   CRASH_TRACE   a file to which each counted call is appended: "number name path"
 *   CRASH_AT      the number of a call, from 1; without it nothing is done to any
 *   CRASH_HOW     kill: SIGKILL before the call, of a write after half of its bytes; ENOSPC, EIO: the call
 *                 fails; INT, TERM, USR1: that signal comes and is taken before the call; INT*2: twice, with a
 *                 pause. Where it is a signal, reads count, too
 *   CRASH_READS   if set, what counts are the calls that read instead: that look at a path, list a folder, open a
 *                 file that is not to be made, and read of it
 *
 * It is the system calls that are counted, not the C library's functions: what stdio writes never passes
 * through a symbol that could be replaced. A seccomp filter turns each of them into a SIGSYS; the handler
 * counts it and makes the call itself, with a mark in the sixth argument, which none of them has, by which
 * the filter lets it pass. For Linux on x86-64 and ARM64. Where there is no seccomp, the program ends with
 * code 77. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { MARK = 0x63726173 };

/* The calls that change files or read, by their names in <sys/syscall.h>. */
typedef struct Call {
    const char *name;
    long number;
    int fd, path; /* which argument says what is changed; -1: the other one does */
} Call;
static const Call calls[] = {
    {"write", SYS_write, 0, -1},     {"pwrite", SYS_pwrite64, 0, -1}, {"ftruncate", SYS_ftruncate, 0, -1},
    {"fsync", SYS_fsync, 0, -1},     {"close", SYS_close, 0, -1},     {"open", SYS_openat, -1, 1},
    {"mkdir", SYS_mkdirat, -1, 1},   {"unlink", SYS_unlinkat, -1, 1}, {"rename", SYS_renameat2, -1, 3},
    {"rename", SYS_renameat, -1, 3}, {"read", SYS_read, 0, -1},       {"pread", SYS_pread64, 0, -1},
    {"list", SYS_getdents64, 0, -1}, {"look", SYS_newfstatat, -1, 1},
#ifdef SYS_rename /* the older calls, which x86-64 has besides */
    {"mkdir", SYS_mkdir, -1, 0},     {"unlink", SYS_unlink, -1, 0},   {"rmdir", SYS_rmdir, -1, 0},
    {"rename", SYS_rename, -1, 1},
#endif
};
enum { CALLS = sizeof calls / sizeof calls[0] };

static const char *folder;
static int trace = -1;
static unsigned long crash_at;
static int crash_error;  /* 0: the process is killed, or */
static int crash_signal; /* 0: none */
static int crash_times;  /* of the signal */
static bool crash_reads;
static atomic_ulong count;

/* The call itself; as the kernel answers: below 0 for an error. */
static long make_call(long number, const unsigned long argument[5]) {
    const long result = syscall(number, argument[0], argument[1], argument[2], argument[3], argument[4],
                                (long)MARK);
    return result == -1 ? -errno : result;
}

/* Whether this kind of call counts. */
static bool is_of_interest(const Call *call, const unsigned long argument[5]) {
    switch (call->number) {
    case SYS_read:
    case SYS_pread64:
        return crash_reads || crash_signal;
    case SYS_getdents64:
    case SYS_newfstatat:
        return crash_reads;
    case SYS_openat:
        return crash_reads == !(argument[2] & O_CREAT);
    default:
        return !crash_reads;
    }
}

/* What a call is about, if that counts: not the close of a file open for reading, nor what lies outside the
 * folder. */
static bool is_counted(const Call *call, const unsigned long argument[5], char *path, size_t size) {
    if (!is_of_interest(call, argument)) return false;
    if (call->fd >= 0) {
        char link[64];
        const int fd = (int)argument[call->fd], flags = fcntl(fd, F_GETFL);
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        const ssize_t length = readlink(link, path, size - 1);
        if (length < 0 || (call->number == SYS_close && (flags & O_ACCMODE) == O_RDONLY)) return false;
        path[length] = 0;
    } else {
        snprintf(path, size, "%s", (const char *)argument[call->path]);
    }
    const size_t length = strlen(folder);
    return strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* The signal comes, and a thread takes it: this one waits for that. */
static void signal_comes(void) {
    for (int i = 0; i < crash_times; i++) {
        sigset_t pending;
        if (i > 0) usleep(600 * 1000); /* so that it is no part of the first */
        kill(getpid(), crash_signal);
        do {
            usleep(1000);
            sigpending(&pending);
        } while (sigismember(&pending, crash_signal));
    }
}

static long watch_call(const Call *call, unsigned long argument[5]) {
    char path[4096], line[4200];
    if (!is_counted(call, argument, path, sizeof path)) return make_call(call->number, argument);
    const unsigned long number = atomic_fetch_add(&count, 1) + 1;
    const int size = snprintf(line, sizeof line, "%lu %s %s\n", number, call->name, path);
    const unsigned long to_trace[5] = {(unsigned long)trace, (unsigned long)line, (unsigned long)size};
    make_call(SYS_write, to_trace);
    if (number == crash_at && crash_signal) signal_comes();
    if (number != crash_at || crash_signal) return make_call(call->number, argument);
    if (crash_error) {
        /* A close that fails has closed all the same. */
        if (call->number == SYS_close) make_call(call->number, argument);
        return -crash_error;
    }
    argument[2] /= 2;
    if (call->number == SYS_write) make_call(call->number, argument);
    kill(getpid(), SIGKILL);
    return 0;
}

static void on_call(int signal_number, siginfo_t *info, void *context) {
    (void)signal_number;
    const int before = errno;
#if defined(__x86_64__)
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    const int index[5] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8};
    greg_t *result = &r[REG_RAX];
#else
    __u64 *r = ((ucontext_t *)context)->uc_mcontext.regs;
    const int index[5] = {0, 1, 2, 3, 4};
    __u64 *result = &r[0];
#endif
    unsigned long argument[5];
    for (int i = 0; i < 5; i++) argument[i] = (unsigned long)r[index[i]];
    for (size_t i = 0; i < CALLS; i++) {
        if (calls[i].number == info->si_syscall) {
            *result = (__typeof__(*result))watch_call(&calls[i], argument);
            break;
        }
    }
    errno = before;
}

static bool install_filter(void) {
    struct sock_filter filter[5 + CALLS];
    size_t n = 0;
    /* Marked: allow. One of the calls: trap. Else: allow. */
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                               offsetof(struct seccomp_data, args[5]));
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MARK, CALLS + 1, 0);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < CALLS; i++)
        filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (__u32)calls[i].number,
                                                   (__u8)(CALLS - i), 0);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    const struct sock_fprog program = {.len = (unsigned short)n, .filter = filter};
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO};
    return sigaction(SIGSYS, &action, NULL) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
}

__attribute__((constructor)) static void start(void) {
    folder = getenv("CRASH_FOLDER");
    if (!folder) return;
    const char *at = getenv("CRASH_AT"), *how = getenv("CRASH_HOW"), *file = getenv("CRASH_TRACE");
    crash_at = at ? strtoul(at, NULL, 10) : 0;
    crash_error = !how || strcmp(how, "kill") == 0 ? 0 : strcmp(how, "EIO") == 0 ? EIO : ENOSPC;
    crash_reads = getenv("CRASH_READS") != NULL;
    crash_times = how && strchr(how, '*') ? 2 : 1;
    crash_signal = !how                           ? 0
                   : strncmp(how, "INT", 3) == 0  ? SIGINT
                   : strncmp(how, "TERM", 4) == 0 ? SIGTERM
                   : strncmp(how, "USR1", 4) == 0 ? SIGUSR1
                                                  : 0;
    trace = open(file ? file : "/dev/null", O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (trace < 0 || !install_filter()) _exit(77);
}
