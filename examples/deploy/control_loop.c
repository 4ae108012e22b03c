/* A control loop at a fixed rate around an exported policy: reads recorded observations, prints actions and times.
 *
 *     cc -O2 -o control_loop control_loop.c policy.c -I$ORT/include -L$ORT/lib -lonnxruntime -Wl,-rpath,$ORT/lib
 *     ./control_loop POLICY.onnx HZ < observations.txt > actions.csv
 *
 * ORT is the folder of a release of ONNX Runtime (https://github.com/microsoft/onnxruntime/releases).
 * A line of the input is a step: 1 if it starts an episode, else 0, and the numbers of its observation. All of them are
 * read before the loop starts. HZ 0 is as fast as possible. A line of the output is a step: how late it started and how
 * long it took, in microseconds, and the numbers of its action. On a robot, replace observations and actions by those of
 * its driver; the rest stays. `chrt -f 80 ./control_loop ...` gives it a real-time priority.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "policy.h"

static int64_t now(void) { /* in ns */
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void sleep_until(int64_t moment) {
    struct timespec time = {moment / 1000000000, moment % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) != 0) continue;
}

/* Read the numbers of all lines, `width` each. Returns how many lines there are. */
static size_t read_lines(double **numbers, size_t width) {
    size_t count = 0, room = 0;
    double number;
    while (scanf("%lf", &number) == 1) {
        if (count == room) *numbers = realloc(*numbers, (room = 2 * room + 1024) * sizeof(double));
        if (*numbers == NULL) return 0;
        (*numbers)[count++] = number;
    }
    if (count == 0 || count % width != 0 || !feof(stdin)) {
        fprintf(stderr, "The input must have lines of %zu numbers, got %zu numbers\n", width, count);
        return 0;
    }
    return count / width;
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: control_loop POLICY.onnx HZ < observations.txt > actions.csv\n");
        return 2;
    }
    double hz = atof(words[2]);
    Policy *policy = policy_open(words[1]);
    if (policy == NULL) return 1;
    size_t width = 1 + policy_observation_size(policy), size = policy_action_size(policy);
    double *lines = NULL;
    size_t steps = read_lines(&lines, width);
    double *actions = calloc(steps + 1, size * sizeof *actions);
    int64_t *late = calloc(steps + 1, sizeof *late), *took = calloc(steps + 1, sizeof *took);
    if (steps == 0 || actions == NULL || late == NULL || took == NULL) return 1;

    for (int warm_up = 0; warm_up < 100; warm_up++) /* the first calls allocate */
        if (policy_act(policy, lines + 1, actions) != 0) return 1;
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) perror("Pages may be swapped out, as they can't be locked");

    policy_reset(policy);
    int64_t period = hz > 0 ? (int64_t)(1e9 / hz) : 0, tick = now() + period;
    for (size_t step = 0; step < steps; step++) {
        if (period > 0) sleep_until(tick);
        int64_t start = now();
        if (lines[step * width] != 0) policy_reset(policy);
        if (policy_act(policy, lines + step * width + 1, actions + step * size) != 0) return 1;
        took[step] = now() - start;
        late[step] = period > 0 ? start - tick : 0;
        /* A tick that has passed is left out, as a motor driver does. */
        for (tick += period; period > 0 && tick <= now(); tick += period) continue;
    }

    for (size_t step = 0; step < steps; step++) {
        printf("%.3f,%.3f", (double)late[step] / 1e3, (double)took[step] / 1e3);
        for (size_t at = 0; at < size; at++) printf(",%.9g", actions[step * size + at]);
        printf("\n");
    }
    policy_close(policy);
    free(lines), free(actions), free(late), free(took);
    return 0;
}
