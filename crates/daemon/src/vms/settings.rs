// SPDX-License-Identifier: Apache-2.0
//! Class, microslice, weight, cap and lane of each VM, and where each value comes from: `viola set`, kept settings, the
//! configuration, the VM's control group, or the default, in this order.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use viola_host::Vm;
use viola_policy::slices::DEFAULT_WEIGHT;
use viola_proto::lanes::{LaneChange, LaneSetting};
use viola_proto::{Change, ClassSetting, Source};

use crate::host::files::replace_json;
use viola_cli::quantities::{self, DEFAULT_MICROSLICE};
use viola_config::{Accelerator, Auto, Config};

/// Longest time for which a class may be set, seconds.
const MAX_TEMPORARY_SECONDS: u32 = (*quantities::TEMPORARY.end() / 1_000_000_000) as u32;
/// Name of the file of kept settings in `state_dir`.
const FILE_NAME: &str = "settings.json";

/// What `viola set` or the configuration sets for a VM; the next source decides what is absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overrides {
    /// Class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<ClassSetting>,
    /// Microslice, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microslice_ns: Option<u64>,
    /// Weight, 1..=65535.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<Cap>,
    /// Whether the VM may have a VF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<LaneSetting>,
}

/// A cap, or that there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cap {
    /// No cap, even if a later source has one.
    None,
    /// Thousandths of one core.
    Permille(u32),
}

impl Cap {
    fn from_permille(cap: Option<u32>) -> Self {
        cap.map_or(Self::None, Self::Permille)
    }

    fn permille(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Permille(p) => Some(p),
        }
    }
}

impl Overrides {
    fn or(self, below: Self) -> Self {
        Self {
            class: self.class.or(below.class),
            microslice_ns: self.microslice_ns.or(below.microslice_ns),
            weight: self.weight.or(below.weight),
            cap: self.cap.or(below.cap),
            lane: self.lane.or(below.lane),
        }
    }
}

/// A value, and where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting<T> {
    /// The value.
    pub value: T,
    /// Its source.
    pub source: Source,
}

/// What holds for a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Controls {
    /// The class that was set; may be auto.
    pub class: Setting<ClassSetting>,
    /// Microslice, ns.
    pub microslice: Setting<u64>,
    /// Weight, 1..=65535.
    pub weight: Setting<u32>,
    /// Cap of all vCPUs together, thousandths of one core: the lower one of the cap that was set and the control group's quota.
    pub cap: Setting<Option<u32>>,
    /// Quota of each vCPU in the control group, thousandths of one core.
    pub vcpu_quota: Option<u32>,
}

impl Controls {
    /// Whether viola has to enforce the cap, since the kernel does not.
    pub fn capped_by_viola(&self) -> bool {
        self.cap.value.is_some() && self.cap.source != Source::Cgroup
    }
}

/// Settings of all VMs, by identity.
#[derive(Debug)]
pub struct Settings {
    file: PathBuf,
    /// Set with `--keep`: they survive a restart.
    kept: BTreeMap<String, Overrides>,
    /// Set without `--keep`.
    live: BTreeMap<String, Overrides>,
    /// Classes that hold until a time.
    temporary: BTreeMap<String, (ClassSetting, Instant)>,
}

/// Content of the file of kept settings.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingsFile {
    vms: BTreeMap<String, Overrides>,
}

impl Settings {
    /// Reads the kept settings. A damaged file is renamed, and a warning returned.
    pub fn read(state_dir: &Path) -> (Self, Option<String>) {
        let file = state_dir.join(FILE_NAME);
        let (kept, warning) = match fs::read(&file) {
            Ok(bytes) => match serde_json::from_slice::<SettingsFile>(&bytes) {
                Ok(kept) => (kept, None),
                Err(e) => {
                    let damaged = file.with_extension("damaged");
                    let moved = match fs::rename(&file, &damaged) {
                        Ok(()) => format!("it is now {}", damaged.display()),
                        Err(e) => format!("and cannot be set aside: {e}"),
                    };
                    let warning =
                        format!("{} holds no kept settings ({e}); {moved}", file.display());
                    (SettingsFile::default(), Some(warning))
                }
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => (SettingsFile::default(), None),
            Err(e) => (
                SettingsFile::default(),
                Some(format!("{}: {e}; no kept setting holds", file.display())),
            ),
        };
        (
            Self {
                file,
                kept: kept.vms,
                live: BTreeMap::new(),
                temporary: BTreeMap::new(),
            },
            warning,
        )
    }

    /// What is set for a VM, what holds first.
    fn layers(&self, config: &Config, vm: &Vm) -> [(Overrides, Source); 3] {
        let id = vm.id.as_str();
        let mut live = self.live.get(id).copied().unwrap_or_default();
        if let Some((class, _)) = self.temporary.get(id) {
            live.class = Some(*class);
        }
        let kept = self.kept.get(id).copied().unwrap_or_default();
        let file = config
            .vm(id, &vm.name)
            .map_or(Overrides::default(), |v| Overrides {
                class: v.class,
                microslice_ns: v.microslice,
                weight: v.weight,
                cap: v.cap.map(Cap::from_permille),
                lane: None,
            });
        [
            (live, Source::Set),
            (kept, Source::Kept),
            (file, Source::Config),
        ]
    }

    /// The class of a VM: the one of [`Settings::controls`], for each window of the meter.
    pub fn class(&self, config: &Config, vm: &Vm) -> ClassSetting {
        class_of(&self.layers(config, vm), config).value
    }

    /// What holds for a VM.
    pub fn controls(&self, config: &Config, vm: &Vm) -> Controls {
        let layers = self.layers(config, vm);
        let group = vm.cgroup.as_ref();
        let class = class_of(&layers, config);
        let microslice = first(&layers, |s| s.microslice_ns).unwrap_or(Setting {
            value: DEFAULT_MICROSLICE,
            source: Source::Default,
        });
        let weight = first(&layers, |s| s.weight)
            .or_else(|| {
                group.and_then(|g| g.weight).map(|w| Setting {
                    value: w.clamp(1, 65_535),
                    source: Source::Cgroup,
                })
            })
            .unwrap_or(Setting {
                value: DEFAULT_WEIGHT,
                source: Source::Default,
            });
        // A cap above what the VM can use is no cap. The configuration may have one: it is read before the VM is known.
        let max = usable_cores(vm) as u64 * 1000;
        let asked = first(&layers, |s| s.cap).map(|c| Setting {
            value: c.value.permille().filter(|&p| u64::from(p) < max),
            source: c.source,
        });
        let quota = group.and_then(|g| g.quota_permille_of_one_core);
        let cap = match (asked, quota) {
            (
                Some(Setting {
                    value: Some(cap),
                    source,
                }),
                q,
            ) if q.is_none_or(|q| cap <= q) => Setting {
                value: Some(cap),
                source,
            },
            (_, Some(q)) => Setting {
                value: Some(q.max(1)),
                source: Source::Cgroup,
            },
            (asked, None) => asked.unwrap_or(Setting {
                value: None,
                source: Source::Default,
            }),
        };
        let vcpu_quota = group.and_then(|g| g.vcpu_quota_permille);
        Controls {
            class,
            microslice,
            weight,
            cap,
            vcpu_quota,
        }
    }

    /// Checks a change and carries it out.
    ///
    /// # Errors
    /// What is wrong with it; nothing has changed then.
    pub fn change(&mut self, vm: &Vm, change: &Change) -> Result<(), String> {
        let overrides = read(vm, change)?;
        let id = vm.id.to_string();
        if change.keep && shares_its_name(vm) {
            return Err(format!(
                "{id} shares its name with another VM, so a kept setting would not find it again; give it a name of its own"
            ));
        }
        let mut kept = self.kept.clone();
        if change.reset {
            kept.remove(&id);
        }
        if change.keep {
            // Live settings are kept as well: after a restart, the VM has the settings that it has now.
            let live = if change.reset {
                Overrides::default()
            } else {
                self.live.get(&id).copied().unwrap_or_default()
            };
            let below = kept.get(&id).copied().unwrap_or_default();
            kept.insert(id.clone(), overrides.or(live).or(below));
        }
        self.keep(kept)?;
        if change.reset || change.keep {
            self.live.remove(&id);
        }
        if change.reset || change.class.is_some() {
            self.temporary.remove(&id);
        }
        if !change.keep && overrides != Overrides::default() {
            let entry = self.live.entry(id).or_default();
            *entry = overrides.or(*entry);
        }
        Ok(())
    }

    /// Sets a class for a number of seconds (`for_s` of the change); 0 ends a class that was set like this.
    ///
    /// # Errors
    /// What is wrong with it; nothing has changed then.
    pub fn change_for(
        &mut self,
        vm: &Vm,
        change: &Change,
        seconds: u32,
        now: Instant,
    ) -> Result<(), String> {
        let class = change.class.ok_or("for: name a class as well")?;
        let only = Change {
            class: Some(class),
            for_s: Some(seconds),
            ..Change::default()
        };
        if *change != only {
            return Err("for: only a class can be set for some time; leave the rest out".into());
        }
        if seconds > MAX_TEMPORARY_SECONDS {
            return Err(format!(
                "for: {seconds} s is too long; at most {MAX_TEMPORARY_SECONDS} s are allowed"
            ));
        }
        let until = now + Duration::from_secs(seconds.into());
        match seconds {
            0 => self.temporary.remove(vm.id.as_str()),
            _ => self.temporary.insert(vm.id.to_string(), (class, until)),
        };
        Ok(())
    }

    /// Whether a VM has a class for some time.
    pub fn has_temporary(&self) -> bool {
        !self.temporary.is_empty()
    }

    /// Ends the temporary classes whose time is over. Returns the identities of their VMs.
    pub fn end_temporary(&mut self, now: Instant) -> Vec<String> {
        let is_over = |(id, (_, until)): (&String, &(ClassSetting, Instant))| {
            (*until <= now).then(|| id.clone())
        };
        let ended: Vec<String> = self.temporary.iter().filter_map(is_over).collect();
        self.temporary.retain(|_, (_, until)| *until > now);
        ended
    }

    /// Writes the kept settings to the file, if they changed.
    fn keep(&mut self, kept: BTreeMap<String, Overrides>) -> Result<(), String> {
        if kept != self.kept {
            let content = SettingsFile { vms: kept.clone() };
            replace_json(&self.file, &content).map_err(|e| {
                format!(
                    "{} cannot be written ({e}); nothing was changed",
                    self.file.display()
                )
            })?;
            self.kept = kept;
        }
        Ok(())
    }

    /// Lane settings, by the identity of the guest.
    pub fn lanes(&self) -> BTreeMap<String, (LaneSetting, Source)> {
        let of = |overrides: &BTreeMap<String, Overrides>, source: Source| -> Vec<_> {
            let lane = |(id, overrides): (&String, &Overrides)| {
                Some((id.clone(), (overrides.lane?, source)))
            };
            overrides.iter().filter_map(lane).collect()
        };
        let kept = of(&self.kept, Source::Kept).into_iter();
        kept.chain(of(&self.live, Source::Set)).collect()
    }

    /// Changes whether a guest may have a VF. Returns what holds now; `None` when the configuration decides.
    ///
    /// # Errors
    /// What is wrong with the change, or why it cannot be kept.
    pub fn change_lane(
        &mut self,
        id: &str,
        change: LaneChange,
    ) -> Result<Option<(LaneSetting, Source)>, String> {
        if change.lane.is_none() && !change.reset {
            return Err("nothing is to be changed; name lane or reset".into());
        }
        let mut kept = self.kept.clone();
        if change.reset
            && let Some(overrides) = kept.get_mut(id)
        {
            overrides.lane = None;
        }
        if change.keep {
            kept.entry(id.to_owned()).or_default().lane = change.lane;
        }
        kept.retain(|_, overrides| *overrides != Overrides::default());
        self.keep(kept)?;
        let live = self.live.entry(id.to_owned()).or_default();
        live.lane = match change.keep {
            true => None,
            false => change.lane,
        };
        Ok(self.lanes().get(id).copied())
    }
}

/// The class that these layers give a VM.
fn class_of(layers: &[(Overrides, Source); 3], config: &Config) -> Setting<ClassSetting> {
    first(layers, |s| s.class).unwrap_or(Setting {
        value: match config.auto() {
            Auto::On if config.allows(Accelerator::Slices) || config.allows(Accelerator::Turbo) => {
                ClassSetting::Auto
            }
            Auto::On | Auto::Advise | Auto::Off => ClassSetting::Batch,
        },
        source: Source::Default,
    })
}

/// The value of the first source that has one.
fn first<T>(
    layers: &[(Overrides, Source); 3],
    get: impl Fn(&Overrides) -> Option<T>,
) -> Option<Setting<T>> {
    layers.iter().find_map(|(overrides, source)| {
        get(overrides).map(|value| Setting {
            value,
            source: *source,
        })
    })
}

/// Whether another VM has the same name, so that this one's identity ends with it.
pub fn shares_its_name(vm: &Vm) -> bool {
    vm.id.as_str().ends_with(&format!("@{}", vm.pid))
}

/// Number of cores that a VM can use at a time.
pub fn usable_cores(vm: &Vm) -> usize {
    vm.vcpus.len().min(vm.cores.len()).max(1)
}

/// The overrides of a change, checked.
fn read(vm: &Vm, change: &Change) -> Result<Overrides, String> {
    let sentence = |key: &str| {
        let key = key.to_owned();
        move |e: quantities::BadQuantity| format!("{key}: {e}")
    };
    let microslice_ns = match &change.microslice {
        Some(t) => Some(
            quantities::duration_in(t, &quantities::MICROSLICE).map_err(sentence("microslice"))?,
        ),
        None => None,
    };
    let weight = change
        .weight
        .map(quantities::weight)
        .transpose()
        .map_err(sentence("weight"))?;
    let cap = match &change.cap {
        Some(t) => {
            let cap = quantities::cap(t).map_err(sentence("cap"))?;
            if let Some(p) = cap {
                quantities::cap_fits(p, usable_cores(vm), &vm.name).map_err(|e| e.to_string())?;
            }
            Some(Cap::from_permille(cap))
        }
        None => None,
    };
    let overrides = Overrides {
        class: change.class,
        microslice_ns,
        weight,
        cap,
        lane: None,
    };
    if overrides == Overrides::default() && !change.reset && !change.keep {
        return Err(
            "nothing is to be changed; name class, microslice, weight, cap or reset".into(),
        );
    }
    Ok(overrides)
}

#[cfg(test)]
mod tests;
