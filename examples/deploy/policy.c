/* See policy.h. */
#include "policy.h"

#include <math.h>
#include <onnxruntime_c_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIMIT = 64, RANK = 8 };

typedef struct {
    char *name; /* allocated by ONNX Runtime */
    void *data;
    OrtValue *value;
    size_t count, bytes; /* elements; bytes of all of them */
    ONNXTensorElementDataType type;
} Tensor;

struct Policy {
    const OrtApi *ort;
    OrtEnv *env;
    OrtSession *session;
    OrtAllocator *allocator;
    OrtMemoryInfo *memory;
    size_t inputs, outputs, observations, actions; /* is_init follows the observations, the new states the actions */
    Tensor in[LIMIT], out[LIMIT];
    const char *in_names[LIMIT], *out_names[LIMIT];
    const OrtValue *read[2][LIMIT]; /* a state is read from one of two places, and written to the other one */
    OrtValue *write[2][LIMIT];
    int turn;
};

/* Say what went wrong, if something did. */
static bool failed(const OrtApi *ort, OrtStatus *status) {
    if (status == NULL) return false;
    fprintf(stderr, "ONNX Runtime: %s\n", ort->GetErrorMessage(status));
    ort->ReleaseStatus(status);
    return true;
}

static size_t width(ONNXTensorElementDataType type) {
    switch (type) {
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8: return 1;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return 4;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE: return 8;
        default: return 0;
    }
}

/* Describe a tensor of one robot, whose first dimension is the number of rows, and make its place. */
static bool prepare(Policy *policy, Tensor *tensor, bool is_input, size_t index) {
    const OrtApi *ort = policy->ort;
    OrtTypeInfo *info = NULL;
    const OrtTensorTypeAndShapeInfo *shape;
    int64_t sizes[RANK] = {0};
    size_t rank = 0;
    bool wrong =
        failed(ort, (is_input ? ort->SessionGetInputName : ort->SessionGetOutputName)(
                        policy->session, index, policy->allocator, &tensor->name)) ||
        failed(ort, (is_input ? ort->SessionGetInputTypeInfo : ort->SessionGetOutputTypeInfo)(
                        policy->session, index, &info)) ||
        failed(ort, ort->CastTypeInfoToTensorInfo(info, &shape)) ||
        failed(ort, ort->GetTensorElementType(shape, &tensor->type)) ||
        failed(ort, ort->GetDimensionsCount(shape, &rank)) ||
        failed(ort, ort->GetDimensions(shape, sizes, rank < RANK ? rank : RANK));
    if (info != NULL) ort->ReleaseTypeInfo(info);
    if (wrong) return false;
    sizes[0] = 1;
    tensor->count = 1;
    for (size_t at = 0; at < rank && at < RANK; at++) tensor->count *= sizes[at] > 0 ? (size_t)sizes[at] : 0;
    tensor->bytes = tensor->count * width(tensor->type);
    if (rank == 0 || rank > RANK || tensor->bytes == 0) {
        fprintf(stderr, "%s: its type or shape is none of a policy\n", tensor->name);
        return false;
    }
    tensor->data = calloc(tensor->count, width(tensor->type));
    return tensor->data != NULL &&
           !failed(ort, ort->CreateTensorWithDataAsOrtValue(policy->memory, tensor->data, tensor->bytes, sizes, rank,
                                                            tensor->type, &tensor->value));
}

/* Pair each state with the output that replaces it, "next.<its name>". */
static bool wire(Policy *policy) {
    while (policy->observations < policy->inputs && strcmp(policy->in[policy->observations].name, "is_init") != 0)
        policy->observations++;
    size_t states = policy->inputs - policy->observations - 1;
    if (policy->observations == policy->inputs || states >= policy->outputs) {
        fprintf(stderr, "It is no policy of recurl: it lacks the input is_init, or the outputs of its states\n");
        return false;
    }
    policy->actions = policy->outputs - states;
    for (size_t at = 0; at < policy->inputs; at++) {
        policy->in_names[at] = policy->in[at].name;
        policy->read[0][at] = policy->read[1][at] = policy->in[at].value;
    }
    for (size_t at = 0; at < policy->outputs; at++) {
        policy->out_names[at] = policy->out[at].name;
        policy->write[0][at] = policy->write[1][at] = policy->out[at].value;
    }
    for (size_t state = 0; state < states; state++) {
        size_t from = policy->observations + 1 + state, to = policy->actions + state;
        const Tensor *before = &policy->in[from], *after = &policy->out[to];
        if (strncmp(after->name, "next.", 5) != 0 || strcmp(after->name + 5, before->name) != 0 ||
            before->bytes != after->bytes) {
            fprintf(stderr, "%s: its next value must be an output of the same size, got %s\n", before->name, after->name);
            return false;
        }
        policy->read[1][from] = after->value;
        policy->write[1][to] = before->value;
    }
    return true;
}

static bool load(Policy *policy, const char *path) {
    const OrtApi *ort = policy->ort;
    OrtSessionOptions *options = NULL;
    bool wrong =
        failed(ort, ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "policy", &policy->env)) ||
        failed(ort, ort->GetAllocatorWithDefaultOptions(&policy->allocator)) ||
        failed(ort, ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &policy->memory)) ||
        failed(ort, ort->CreateSessionOptions(&options)) ||
        failed(ort, ort->SetIntraOpNumThreads(options, 1)) || /* a robot's network is too small for more */
        failed(ort, ort->SetInterOpNumThreads(options, 1)) ||
        failed(ort, ort->CreateSession(policy->env, path, options, &policy->session)) ||
        failed(ort, ort->SessionGetInputCount(policy->session, &policy->inputs)) ||
        failed(ort, ort->SessionGetOutputCount(policy->session, &policy->outputs));
    if (options != NULL) ort->ReleaseSessionOptions(options);
    if (wrong) return false;
    if (policy->inputs > LIMIT || policy->outputs > LIMIT) {
        fprintf(stderr, "It has more than %d inputs or outputs\n", LIMIT);
        policy->inputs = policy->outputs = 0;
        return false;
    }
    for (size_t at = 0; at < policy->inputs; at++)
        if (!prepare(policy, &policy->in[at], true, at)) return false;
    for (size_t at = 0; at < policy->outputs; at++)
        if (!prepare(policy, &policy->out[at], false, at)) return false;
    return wire(policy);
}

Policy *policy_open(const char *path) {
    const OrtApi *ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (ort == NULL) {
        fprintf(stderr, "This libonnxruntime, %s, is older than the headers\n", OrtGetApiBase()->GetVersionString());
        return NULL;
    }
    Policy *policy = calloc(1, sizeof *policy);
    if (policy == NULL) return NULL;
    policy->ort = ort;
    if (!load(policy, path)) {
        fprintf(stderr, "%s was not loaded\n", path);
        policy_close(policy);
        return NULL;
    }
    policy_reset(policy);
    return policy;
}

static void release(Policy *policy, Tensor *tensors, size_t count) {
    for (size_t at = 0; at < count; at++) {
        if (tensors[at].value != NULL) policy->ort->ReleaseValue(tensors[at].value);
        if (tensors[at].name != NULL) failed(policy->ort, policy->ort->AllocatorFree(policy->allocator, tensors[at].name));
        free(tensors[at].data);
    }
}

void policy_close(Policy *policy) {
    release(policy, policy->in, policy->inputs);
    release(policy, policy->out, policy->outputs);
    if (policy->session != NULL) policy->ort->ReleaseSession(policy->session);
    if (policy->memory != NULL) policy->ort->ReleaseMemoryInfo(policy->memory);
    if (policy->env != NULL) policy->ort->ReleaseEnv(policy->env);
    free(policy);
}

static size_t elements(const Tensor *tensors, size_t count) {
    size_t sum = 0;
    for (size_t at = 0; at < count; at++) sum += tensors[at].count;
    return sum;
}

size_t policy_observation_size(const Policy *policy) { return elements(policy->in, policy->observations); }

size_t policy_action_size(const Policy *policy) { return elements(policy->out, policy->actions); }

void policy_reset(Policy *policy) { *(bool *)policy->in[policy->observations].data = true; }

static bool put(const Tensor *tensor, const double *numbers) {
    for (size_t at = 0; at < tensor->count; at++) {
        double number = numbers[at];
        if (!isfinite(number)) {
            fprintf(stderr, "%s: its numbers must be finite, got %g at %zu\n", tensor->name, number, at);
            return false;
        }
        switch (tensor->type) {
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL: ((bool *)tensor->data)[at] = number != 0; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: ((int8_t *)tensor->data)[at] = (int8_t)number; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8: ((uint8_t *)tensor->data)[at] = (uint8_t)number; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: ((int32_t *)tensor->data)[at] = (int32_t)number; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: ((int64_t *)tensor->data)[at] = (int64_t)number; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: ((float *)tensor->data)[at] = (float)number; break;
            default: ((double *)tensor->data)[at] = number;
        }
    }
    return true;
}

static void get(const Tensor *tensor, double *numbers) {
    for (size_t at = 0; at < tensor->count; at++) {
        switch (tensor->type) {
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL: numbers[at] = ((bool *)tensor->data)[at]; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: numbers[at] = ((int8_t *)tensor->data)[at]; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8: numbers[at] = ((uint8_t *)tensor->data)[at]; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: numbers[at] = ((int32_t *)tensor->data)[at]; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: numbers[at] = (double)((int64_t *)tensor->data)[at]; break;
            case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: numbers[at] = ((float *)tensor->data)[at]; break;
            default: numbers[at] = ((double *)tensor->data)[at];
        }
    }
}

int policy_act(Policy *policy, const double *observation, double *action) {
    for (size_t at = 0; at < policy->observations; observation += policy->in[at++].count)
        if (!put(&policy->in[at], observation)) return -1;
    OrtStatus *status = policy->ort->Run(policy->session, NULL, policy->in_names, policy->read[policy->turn],
                                         policy->inputs, policy->out_names, policy->outputs, policy->write[policy->turn]);
    if (failed(policy->ort, status)) return -1;
    policy->turn = !policy->turn;
    *(bool *)policy->in[policy->observations].data = false;
    for (size_t at = 0; at < policy->actions; action += policy->out[at++].count) get(&policy->out[at], action);
    return 0;
}
