/* SPDX-License-Identifier: GPL-2.0-only */
/* Integers and inlining under the names that the kernel's and libbpf's headers use. */
#ifndef VIOLA_TYPES_H
#define VIOLA_TYPES_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;
typedef long long s64;
typedef u8 __u8;
typedef u16 __u16;
typedef u32 __u32;
typedef u64 __u64;
typedef s32 __s32;
typedef s64 __s64;
typedef u16 __be16;
typedef u32 __be32;
typedef u32 __wsum;

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

/* A function that the verifier examines once, not on every path that leads to a call: it is global in BPF. */
#ifdef __bpf__
#define __subprog __attribute__((noinline))
#else
#define __subprog static
#endif

#endif
