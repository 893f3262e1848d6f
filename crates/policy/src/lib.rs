// SPDX-License-Identifier: Apache-2.0
//! Pure decisions of viola: no clock, no file, no thread.
//!
//! Each function takes what was observed and returns what should be done. The daemon, the real-time slot controller and
//! the simulator run the same code, so what is tested in one holds in the others.
//!
//! | module | decides |
//! |---|---|
//! | [`slices`] | which VM runs on a core next and until when; the class of a VM |
//! | [`turbo`] | the same for turbo cores; which VMs get a turbo vCPU; how many turbo cores there are |
//! | [`place`] | which vCPU runs on which core |
//! | [`lanes`] | which VMs hold the few virtual functions of a NIC |
//! | [`compare`] | whether a change made a difference, from windows without and with it |
//! | [`trial`] | whether a change stays: pairs of windows, and a test after some of them |
//! | [`blocks`] | which VMs read HDFS blocks of another VM of their host |
//! | [`pipes`] | which VMs send files, and how much the host may send on behalf of a VM |

mod hysteresis;
mod text;

pub mod blocks;
pub mod compare;
pub mod lanes;
pub mod pipes;
pub mod place;
pub mod slices;
pub mod trial;
pub mod turbo;
