// SPDX-License-Identifier: Apache-2.0
//! What runs the measured guests: KVM where it runs guests, else User Mode Linux.

use std::path::Path;

use clap::{Args, ValueEnum};
use viola_lab::qemu::{Accel, Image, check_kvm};
use viola_lab::{Vmm, run_folder};

use viola_cli::error::{Failure, Outcome};

/// What runs the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GuestKind {
    /// QEMU with KVM.
    Kvm,
    /// User Mode Linux.
    Uml,
    /// QEMU without KVM, some ten times slower: shows that a benchmark works with QEMU's guests, and no speed.
    Emulated,
}

impl GuestKind {
    /// Keys of `[lab]` in a lab's description.
    pub fn lab_keys(self) -> &'static str {
        match self {
            Self::Kvm => "vmm = \"qemu\"\naccel = \"kvm\"\n",
            Self::Uml => "",
            Self::Emulated => "vmm = \"qemu\"\naccel = \"tcg\"\n",
        }
    }

    /// Path in the guest of the disk with this number in a lab's description, 0 to 25.
    pub fn disk(self, number: u8) -> String {
        let letter = char::from(b'a' + number);
        match self {
            Self::Uml => format!("/dev/ubd{letter}"),
            Self::Kvm | Self::Emulated => format!("/dev/vd{letter}"),
        }
    }

    /// The name of a result of these guests: `slices` of UML guests, `slices-kvm` of KVM guests.
    pub fn result(self, name: &str) -> String {
        match self {
            Self::Uml => name.to_owned(),
            Self::Kvm => format!("{name}-kvm"),
            Self::Emulated => format!("{name}-emulated"),
        }
    }

    /// Whether its results are evidence of speed.
    pub fn is_evidence(self) -> bool {
        self != Self::Emulated
    }
}

/// The option that chooses it.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct GuestOption {
    /// What runs the guests; by default KVM where it runs guests, else User Mode Linux.
    #[arg(long, value_name = "KIND", value_enum)]
    guests: Option<GuestKind>,
}

impl GuestOption {
    /// The kind that was chosen, or the best one of this host. Says why where /dev/kvm exists but runs no guests.
    ///
    /// # Errors
    /// KVM was chosen, and does not run guests here.
    pub fn kind(self) -> Outcome<GuestKind> {
        match self.guests {
            Some(GuestKind::Kvm) => check().map_err(Failure::run).map(|()| GuestKind::Kvm),
            Some(other) => Ok(other),
            None if !Path::new("/dev/kvm").exists() => Ok(GuestKind::Uml),
            None => Ok(match check() {
                Ok(()) => GuestKind::Kvm,
                Err(why) => {
                    eprintln!("viola-lab: {why}; the guests are User Mode Linux");
                    GuestKind::Uml
                }
            }),
        }
    }
}

/// Whether KVM runs a guest here.
fn check() -> Result<(), String> {
    let image = Image::find().map_err(|e| e.to_string())?;
    let folder = run_folder();
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    check_kvm(&image, &folder)
}

/// A short name of a lab's guests and of their kernel, for results.
pub fn describe(vmm: &Vmm, kernel: &str) -> String {
    match vmm {
        Vmm::Uml => format!("User Mode Linux {kernel}"),
        Vmm::Qemu(qemu) if qemu.accel == Some(Accel::Kvm) => format!("KVM, Linux {kernel}"),
        Vmm::Qemu(_) => format!("QEMU without KVM, Linux {kernel}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_each_kind_have_their_own_file() {
        let names = [GuestKind::Uml, GuestKind::Kvm, GuestKind::Emulated].map(|k| k.result("auto"));
        assert_eq!(names, ["auto", "auto-kvm", "auto-emulated"]);
    }

    #[test]
    fn disks_are_called_as_the_guests_kernel_calls_them() {
        let names = [GuestKind::Uml, GuestKind::Kvm, GuestKind::Emulated].map(|k| k.disk(1));
        assert_eq!(names, ["/dev/ubdb", "/dev/vdb", "/dev/vdb"]);
    }

    #[test]
    fn a_chosen_kind_that_needs_no_kvm_is_taken() {
        for kind in [GuestKind::Uml, GuestKind::Emulated] {
            let option = GuestOption { guests: Some(kind) };
            assert_eq!(option.kind().unwrap(), kind);
        }
    }
}
