/* Pinned memory that a stream still copies from or to: whoever on the host touches it too early is found.

   No library tells that it reads memory of the host. So pages that are being copied to are taken away, and pages that are
   copied from may not be written, until the host has waited for the copy. Who touches such a page before ends in a signal,
   is reported, and goes on. A system call that is given such memory fails with EFAULT instead. */
#include "order.h"
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

enum { PAGE = 4096 };
static struct pending { uintptr_t at, end; struct access access; } *pending;
static size_t count, room;
static struct sigaction before;

static uintptr_t down(uintptr_t at) { return at / PAGE * PAGE; }
static uintptr_t up(uintptr_t at) { return (at + PAGE - 1) / PAGE * PAGE; }
static void allow(uintptr_t at, uintptr_t end, int rights) { mprotect((void *)down(at), up(end) - down(at), rights); }
static int overlaps(const struct pending *p, uintptr_t at, uintptr_t end) { return down(p->at) < up(end) && down(at) < up(p->end); }

/* What the copies that are left say of these pages. */
static void protect(uintptr_t at, uintptr_t end)
{
    allow(at, end, PROT_READ | PROT_WRITE);
    for (int writes = 0; writes < 2; writes++)
        for (size_t i = 0; i < count; i++)
            if (pending[i].access.writes == writes && overlaps(&pending[i], at, end)) allow(pending[i].at, pending[i].end, writes ? PROT_NONE : PROT_READ);
}
static int is_known(const struct pending *p) { return order_knows(0, &p->access); }
static void remove_where(int (*is_over)(const struct pending *))
{
    size_t kept = 0, gone = 0;
    struct pending *dropped = malloc((count + 1) * sizeof *dropped);
    for (size_t i = 0; i < count; i++)
        if (is_over(&pending[i])) dropped[gone++] = pending[i];
        else pending[kept++] = pending[i];
    count = kept;
    for (size_t i = 0; i < gone; i++) protect(dropped[i].at, dropped[i].end);
    free(dropped);
}
void pinned_release(void) { if (count) remove_where(is_known); }

static __thread uintptr_t wanted_at, wanted_end;
static int is_wanted(const struct pending *p) { return overlaps(p, wanted_at, wanted_end); }
void pinned_forget(uintptr_t at, size_t size)
{
    wanted_at = at;
    wanted_end = at + size;
    if (count) remove_where(is_wanted);
}
void pinned_open(const void *at, size_t size)
{
    LOCK;
    for (size_t i = 0; i < count; i++)
        if (overlaps(&pending[i], (uintptr_t)at, (uintptr_t)at + size)) allow(pending[i].at, pending[i].end, PROT_READ | PROT_WRITE);
    UNLOCK;
}

/* Somebody of the host touches such a page: what is pending there is let go, whether or not it is what was touched. */
static void touched(int signal, siginfo_t *info, void *context)
{
    uintptr_t at = (uintptr_t)info->si_addr;
    int is_write = 1, is_ours = 0, is_faulty = 0;
    struct fault fault;
#ifdef __x86_64__
    is_write = ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] >> 1 & 1;
#endif
    LOCK;
    for (size_t i = 0; i < count; i++) {
        struct pending *p = &pending[i];
        if (!overlaps(p, at, at + 1)) continue;
        is_ours = 1;
        if (at < p->at || at >= p->end || (!is_write && !p->access.writes)) continue;
        struct access mine = {.writes = is_write, .stack = -1, .what = is_write ? "a write of the host" : "a read of the host"};
        fault = order_fault(&p->access, &mine, at);
        is_faulty = 1;
    }
    if (is_ours) pinned_forget(at, 1);
    else is_ours = block_of((void *)at, &(struct block){0}); /* another thread has touched it, too, and let it go */
    UNLOCK;
    if (is_faulty) {
        fault.after.stack = order_stack_here();
        order_report(&fault);
    }
    if (is_ours) return;
    if (before.sa_flags & SA_SIGINFO && before.sa_sigaction) before.sa_sigaction(signal, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(signal);
    else sigaction(SIGSEGV, &before, 0); /* it comes again, and ends the process */
}
static void listen(void) /* others set handlers, too */
{
    struct sigaction now, mine = {.sa_sigaction = touched, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigaction(SIGSEGV, 0, &now);
    if (now.sa_sigaction == touched) return;
    before = now;
    sigaction(SIGSEGV, &mine, 0);
}
void pinned_touched(uintptr_t at, size_t size, const struct access *a)
{
    listen();
    if (count == room) pending = realloc(pending, (room = 2 * room + 64) * sizeof *pending);
    pending[count++] = (struct pending){at, at + size, *a};
    protect(at, at + size);
}
