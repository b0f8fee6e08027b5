// The life of a file's state. It is made at the file's first vMem call, loses the pages of each GPU that is
// unregistered, and ends with the file.
//
// SPDX-License-Identifier: MIT OR GPL-2.0-only
#include "uvm_vmem_file.h"
#include "uvm_vmem_call.h"
#include "uvm_vmem_hooks.h"
#include "uvm_vmem_memory.h"

static struct uvm_vmem_space *space_make(struct file *filp)
{
    struct uvm_vmem_reserve *reserve = uvm_vmem_zalloc(sizeof(*reserve));
    struct uvm_vmem_space *space = NULL;

    if (reserve)
        space = uvm_vmem_space_alloc(uvm_va_space_get(filp), reserve);
    if (space)
        mutex_init(&reserve->lock);
    else
        uvm_vmem_free(reserve);
    return space;
}

struct uvm_vmem_space *uvm_vmem_file_space(struct file *filp)
{
    struct uvm_vmem_space **vmem = &uvm_va_space_get(filp)->vmem;
    struct uvm_vmem_space *space = smp_load_acquire(vmem);
    struct uvm_vmem_space *made;

    if (space)
        return space;

    made = space_make(filp);
    if (!made)
        return NULL;

    // Two threads may make their first call at once. One state is the file's, and the other goes.
    space = cmpxchg(vmem, NULL, made);
    if (!space)
        return made;
    uvm_vmem_space_free(made);
    return space;
}

void uvm_vmem_unregister_gpu(uvm_va_space_t *va_space, uvm_gpu_t *gpu)
{
    struct uvm_vmem_space *space = va_space->vmem;
    struct uvm_vmem_gpu *vgpu;

    uvm_assert_rwsem_locked_write(&va_space->lock);

    if (!space)
        return;

    mutex_lock(&space->lock);
    vgpu = uvm_vmem_gpu_find(space, gpu);
    if (vgpu) {
        UVM_ASSERT(!atomic64_read(&vgpu->overlays));
        uvm_vmem_memory_free_all(vgpu);
        list_del(&vgpu->node);
        uvm_vmem_free(vgpu);
    }
    mutex_unlock(&space->lock);
}

void uvm_vmem_destroy(uvm_va_space_t *va_space)
{
    if (va_space->vmem)
        uvm_vmem_space_free(va_space->vmem);
    va_space->vmem = NULL;
}
