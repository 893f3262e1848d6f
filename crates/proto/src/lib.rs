// SPDX-License-Identifier: Apache-2.0
//! Messages between the daemon and the command line.
