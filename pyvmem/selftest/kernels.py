"""The self-test's GPU code, as PTX: the driver compiles it when it is loaded, so that no toolkit is needed.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

# Word i of a region holds FACTOR * (first + i): no two words are equal, and none is 0 for an odd position.
FACTOR = 0x9E3779B97F4A7C15

_INDEX = """
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r0, %r1, %r2;
    cvt.u64.u32 %i, %r3;
"""

# move(from, to, n): *to[i] = *from[i].
# differ(base, n, first, count): adds the number of words at base that differ from the region's pattern to *count.
# poll(addr, control, out, mask): a thread per block loads *addr until control[1] is not 0. control[0], in the host's
#   memory, is the least value that a load may return from then on: an acquire orders the two. out[4 * block]: loads,
#   the first value that was too small, what was the least then, and the largest value.
# store(addr, control, out, mask): a thread per block writes to words of the page until control[1] is not 0.
PTX = f"""
.version 7.0
.target sm_75
.address_size 64

.visible .entry move(.param .u64 from, .param .u64 to, .param .u64 n)
{{
    .reg .pred %p; .reg .u32 %r<4>; .reg .u64 %i, %n, %a, %o, %v;
    {_INDEX}
    ld.param.u64 %n, [n];
    setp.ge.u64 %p, %i, %n;
    @%p ret;
    ld.param.u64 %a, [from];
    ld.param.u64 %o, [to];
    shl.b64 %i, %i, 3;
    add.u64 %a, %a, %i;
    add.u64 %o, %o, %i;
    ld.global.u64 %a, [%a];
    ld.global.u64 %o, [%o];
    ld.volatile.global.u64 %v, [%a];
    st.volatile.global.u64 [%o], %v;
    ret;
}}

.visible .entry differ(.param .u64 base, .param .u64 n, .param .u64 first, .param .u64 count)
{{
    .reg .pred %p; .reg .u32 %r<5>; .reg .u64 %i, %n, %b, %f, %c, %a, %v, %w, %s;
    {_INDEX}
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %s, %r4, %r1;
    ld.param.u64 %b, [base];
    ld.param.u64 %n, [n];
    ld.param.u64 %f, [first];
    ld.param.u64 %c, [count];
next:
    setp.ge.u64 %p, %i, %n;
    @%p ret;
    shl.b64 %a, %i, 3;
    add.u64 %a, %a, %b;
    ld.volatile.global.u64 %v, [%a];
    add.u64 %w, %f, %i;
    mul.lo.u64 %w, %w, {FACTOR - (1 << 64)};
    add.u64 %i, %i, %s;
    setp.eq.u64 %p, %v, %w;
    @%p bra next;
    red.global.add.u64 [%c], 1;
    bra next;
}}

.visible .entry poll(.param .u64 addr, .param .u64 control, .param .u64 out, .param .u64 mask)
{{
    .reg .pred %p, %q; .reg .u32 %r0; .reg .u64 %a, %c, %o, %n, %e, %v, %w, %l, %m, %k;
    ld.param.u64 %a, [addr];
    ld.param.u64 %c, [control];
    ld.param.u64 %o, [out];
    mov.u32 %r0, %ctaid.x;
    mul.wide.u32 %k, %r0, 32;
    add.u64 %o, %o, %k;
    mov.u64 %n, 0;
    mov.u64 %w, 0;
    mov.u64 %l, 0;
    mov.u64 %m, 0;
next:
    ld.acquire.sys.global.u64 %e, [%c];
    ld.relaxed.gpu.global.u64 %v, [%a];
    add.u64 %n, %n, 1;
    max.u64 %m, %m, %v;
    setp.lt.u64 %p, %v, %e;
    setp.eq.and.u64 %q, %l, 0, %p;
    @%q mov.u64 %w, %v;
    @%q mov.u64 %l, %e;
    ld.volatile.global.u64 %k, [%c+8];
    setp.eq.u64 %p, %k, 0;
    @%p bra next;
    st.global.u64 [%o], %n;
    st.global.u64 [%o+8], %w;
    st.global.u64 [%o+16], %l;
    st.global.u64 [%o+24], %m;
    ret;
}}

.visible .entry store(.param .u64 addr, .param .u64 control, .param .u64 out, .param .u64 mask)
{{
    .reg .pred %p; .reg .u32 %r0; .reg .u64 %a, %c, %m, %i, %b, %k;
    ld.param.u64 %a, [addr];
    ld.param.u64 %m, [mask];
    ld.param.u64 %c, [control];
    mov.u32 %r0, %ctaid.x;
    mul.wide.u32 %i, %r0, 8;
next:
    and.b64 %b, %i, %m;
    add.u64 %b, %b, %a;
    st.volatile.global.u64 [%b], %c;
    add.u64 %i, %i, 4104;
    ld.volatile.global.u64 %k, [%c+8];
    setp.eq.u64 %p, %k, 0;
    @%p bra next;
    ret;
}}
"""
