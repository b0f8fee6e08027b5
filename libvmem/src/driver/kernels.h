// The question to the device itself: have all kernels ended? Leases ask it, and pyvmem before an owner's memory goes.
//
// SPDX-License-Identifier: MIT
#ifndef VMEM_DRIVER_KERNELS_H
#define VMEM_DRIVER_KERNELS_H

// Returns when all work that this process gave the device has ended. -EBUSY: a CUDA graph is being captured, during
// which nobody can know; the question ends the capture, in whatever mode. Other errors mean that no kernel runs any more:
// CUDA has ended, or the context is lost.
int vmem__wait_for_kernels(int device);

// Between these two, the calling thread's driver calls do not invalidate a capture that another thread has begun.
// Returns the mode to restore.
int vmem__beside_captures(void);
void vmem__restore_capture_mode(int mode);

#endif
