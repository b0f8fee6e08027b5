// SPDX-License-Identifier: MIT
#include "vmtest.h"

#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <time.h>

static struct vmtest *first;
static const char *current = "";

void vmtest_add(struct vmtest *t)
{
    struct vmtest **at = &first;

    while (*at)
        at = &(*at)->next;
    *at = t;
}

void vmtest_fail(const char *file, int line, const char *fmt, ...)
{
    const char *base = strrchr(file, '/');
    va_list ap;

    flockfile(stdout);
    printf("not ok %s - %s:%d: ", current, base ? base + 1 : file, line);
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    printf("\n");
    fflush(stdout);
    funlockfile(stdout);
    _exit(1);
}

void vmtest_skip(const char *fmt, ...)
{
    va_list ap;

    printf("skip %s - ", current);
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    printf("\n");
    fflush(stdout);
    _exit(77);
}

void vmtest_figure(const char *name, double value, const char *unit)
{
    printf("fig %s %.6g %s\n", name, value, unit);
    fflush(stdout);
}

long env_long(const char *name, long def)
{
    const char *text = getenv(name);

    return text && *text ? strtol(text, NULL, 0) : def;
}

// splitmix64
uint64_t rng_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

int wait_child(pid_t pid)
{
    int status;

    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static bool wanted(const char *name, int argc, char **argv)
{
    if (argc < 2)
        return true;
    for (int i = 1; i < argc; i++)
        if (strstr(name, argv[i]))
            return true;
    return false;
}

// Arguments select the cases whose names contain one of them.
int main(int argc, char **argv)
{
    int bad = 0, ran = 0;

    for (struct vmtest *t = first; t; t = t->next) {
        double t0 = seconds();
        pid_t pid;
        int rc;

        if (!wanted(t->name, argc, argv))
            continue;
        ran++;
        current = t->name;
        fflush(NULL);
        pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            alarm(env_long("CASE_TIMEOUT", 300));
            sim_baseline();
            t->run();
            guards_check();
            fflush(NULL);
            _exit(0);
        }
        rc = wait_child(pid);
        if (rc == 0)
            printf("ok %s (%.2f s)\n", t->name, seconds() - t0);
        else if (rc > 128)
            printf("not ok %s - killed by signal %d after %.0f s\n", t->name, rc - 128, seconds() - t0);
        else if (rc != 77 && rc != 1)
            printf("not ok %s - exit %d\n", t->name, rc);
        bad += rc != 0 && rc != 77;
        fflush(stdout);
    }
    if (!ran)
        printf("not ok %s - no such case\n", argc > 1 ? argv[1] : "");
    return bad || !ran;
}
