// The lease's question to the device itself: have all kernels ended?
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_TORCH_DEVICE_H
#define VMEM_TORCH_DEVICE_H

// Returns when all work that this process gave the device has ended. -EBUSY: a CUDA graph is being captured, during
// which nobody can know. Other errors mean that no kernel runs any more: CUDA has ended, or the context is lost.
int vmem__torch_wait_for_kernels(int device);

// Between these two, the calling thread's driver calls do not invalidate a capture that another thread has begun.
// Returns the mode to restore.
int vmem__torch_beside_captures(void);
void vmem__torch_restore_capture_mode(int mode);

#endif
