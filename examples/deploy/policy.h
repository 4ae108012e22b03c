/* A policy exported by `recurl export --format onnx`, for one robot, run by ONNX Runtime on one thread.
 *
 * Observations and actions are flat arrays of numbers: all entries that the policy reads, in the order of the "inputs"
 * in the file's description (policy.onnx.json), one after the other, whatever their types are. The policy keeps its
 * hidden states. Apart from what ONNX Runtime does inside, policy_act allocates nothing. Not thread-safe.
 */
#ifndef POLICY_H
#define POLICY_H

#include <stddef.h>

typedef struct Policy Policy;

/* Load a file. Returns NULL, and says on stderr why, if that fails. */
Policy *policy_open(const char *path);
void policy_close(Policy *policy);

size_t policy_observation_size(const Policy *policy);
size_t policy_action_size(const Policy *policy);

/* Forget the past: the next call of policy_act starts an episode. A policy that was just opened starts one, too. */
void policy_reset(Policy *policy);

/* Compute the action of one step, at the rate at which the policy was trained. Returns 0; or -1, and says on stderr why,
 * if a number of the observation is not finite, or ONNX Runtime fails: then the action and the hidden states stay as
 * they are. */
int policy_act(Policy *policy, const double *observation, double *action);

#endif
