#!/usr/bin/perl
# SPDX-License-Identifier: Apache-2.0
# qemu-mend.pl FILE: patches a QEMU program so that an emulated AMD host injects an interrupt once, not twice.
#
# VMRUN with an interrupt to be injected (AMD64 Architecture Programmer's Manual 2, 15.20) delivers it at once, in
# helper_vmrun (target/i386/tcg/system/svm_helper.c, as of QEMU 10.0). Before that it writes the vector to
# cpu->exception_index and leaves it there. When QEMU next leaves the vCPU's loop between two instructions, which it does at
# every end of an instruction budget (-icount), it takes the number for an exception that is still due. It delivers the
# interrupt a second time, although interrupts are off: the guest's kernel then waits for ever for a lock that its own
# handler holds. No code reads the number in between, so this script replaces the store by a no-operation of the same length.
#
# It changes only the test beds' own copy. If the code is not found exactly once, it reports that and changes nothing.
use strict;
use warnings;

my $file = shift or die "usage: qemu-mend.pl FILE\n";
open my $in, '<:raw', $file or die "qemu-mend: $file: $!\n";
my $code = do { local $/; <$in> };
close $in;

# mov reg, exception_index; movl $0, exception_is_int; movq $-1, exception_next_eip; ...; mov $1, %edx; ...; call
my $store = qr/\x89[\x80-\xbf]..\xff\xff/s;
my $after = qr/\xc7[\x80-\xbf]....\0{4}\x48\xc7[\x80-\xbf]....\xff{4}.{0,24}\xba\x01\0\0\0.{0,8}\xe8/s;
my @found;
push @found, $-[0] while $code =~ /$store(?=$after)/g;
die "qemu-mend: the code to patch was found " . @found . " times in $file, not once; "
    . "has QEMU changed? Compare helper_vmrun in its source\n" if @found != 1;
substr($code, $found[0], 6) = "\x66\x0f\x1f\x44\0\0";

open my $out, '+<:raw', $file or die "qemu-mend: $file: $!\n";
print $out $code;
close $out or die "qemu-mend: $file: $!\n";
