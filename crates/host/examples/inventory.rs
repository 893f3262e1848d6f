// SPDX-License-Identifier: Apache-2.0
//! Prints the VMs of this host as JSON.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let inventory = viola_host::Inventory::scan()?;
    for warning in inventory.warnings() {
        eprintln!("{warning}");
    }
    println!("{}", serde_json::to_string_pretty(inventory.vms())?);
    Ok(())
}
