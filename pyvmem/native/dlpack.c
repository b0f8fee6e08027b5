// DLPack: https://dmlc.github.io/dlpack/latest/ (the structures are an ABI; these are the fields of its version 0).
//
// SPDX-License-Identifier: MIT
#include <Python.h>

#include <stdlib.h>

#include "native.h"

struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_managed {
    struct dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
    int64_t shape;
};

enum { DL_UINT = 1 };

// The end of an owner waits for kernels, which may wait for what another thread does in Python: without the interpreter's
// lock, if this thread has it. A thread that knows no Python must not take it, not even to ask.
static void drop(struct dl_managed *managed)
{
    PyGILState_STATE held = PyGILState_UNLOCKED;
    PyThreadState *state = NULL;
    if (PyGILState_GetThisThreadState()) {
        held = PyGILState_Ensure();
        state = PyEval_SaveThread();
    }
    pv_owner_end_tensor(managed->context);
    if (state) {
        PyEval_RestoreThread(state);
        PyGILState_Release(held);
    }
    free(managed);
}

void *pv_dlpack_bytes(uint64_t addr, uint64_t length, int32_t device_type, int32_t device_id)
{
    struct dl_managed *managed = malloc(sizeof(*managed));
    if (!managed)
        return NULL;
    *managed = (struct dl_managed){
        .tensor = {.data = (void *)(uintptr_t)addr,
                   .device = {device_type, device_id},
                   .ndim = 1,
                   .dtype = {DL_UINT, 8, 1},
                   .shape = &managed->shape},
        .deleter = drop,
        .shape = (int64_t)length,
    };
    return managed;
}

void pv_dlpack_keep(void *managed, pv_owner *owner)
{
    pv_owner_keep(owner);
    ((struct dl_managed *)managed)->context = owner;
}

// A consumed capsule has another name and belongs to the consumer.
void pv_dlpack_capsule_free(void *capsule)
{
    if (!PyCapsule_IsValid(capsule, "dltensor"))
        return;
    struct dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}
