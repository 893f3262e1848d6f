// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import static org.junit.Assert.assertTrue;

import java.util.function.BooleanSupplier;

final class Waiting {
  private Waiting() {
  }

  static void until(String what, BooleanSupplier done) throws InterruptedException {
    long end = System.nanoTime() + 20_000_000_000L;
    while (!done.getAsBoolean()) {
      assertTrue(what + ": not within 20 s", System.nanoTime() < end);
      Thread.sleep(5);
    }
  }
}
