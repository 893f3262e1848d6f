// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import com.sun.nio.file.ExtendedOpenOption;
import java.io.Closeable;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.AccessDeniedException;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

/**
 * A file in the mount. Only mount threads may call its methods: each call may hang as long as the mount does.
 */
final class BlockFile implements Closeable {
  final long size;
  private final FileChannel channel;

  private BlockFile(FileChannel channel) throws IOException {
    this.channel = channel;
    this.size = channel.size();
  }

  /** Opens the file, with O_DIRECT if {@code direct} is set. */
  static BlockFile open(Path path, boolean direct) throws IOException {
    FileChannel channel = direct
        ? FileChannel.open(path, StandardOpenOption.READ, ExtendedOpenOption.DIRECT)
        : FileChannel.open(path, StandardOpenOption.READ);
    try {
      return new BlockFile(channel);
    } catch (IOException e) {
      channel.close();
      throw e;
    }
  }

  /** Whether the open failed for another reason than missing O_DIRECT support. */
  static boolean isFinal(IOException e) {
    return e instanceof NoSuchFileException || e instanceof AccessDeniedException || e instanceof FallbackException;
  }

  /**
   * Reads from {@code start}, a multiple of {@link Buffers#ALIGN}, up to {@code end}, which is at most the
   * file's size. The returned buffer begins with the byte at {@code start}; its limit marks {@code end}.
   */
  ByteBuffer read(long start, long end, Buffers buffers) throws IOException {
    int wanted = (int) (end - start);
    int aligned = (wanted + Buffers.ALIGN - 1) & -Buffers.ALIGN;
    ByteBuffer buffer = buffers.take(aligned);
    boolean whole = false;
    try {
      buffer.limit(aligned);
      while (buffer.position() < wanted) {
        int got = channel.read(buffer, start + buffer.position());
        if (got <= 0) {
          throw new FallbackException(FallbackReason.ERROR, "its file ends at " + (start + buffer.position()) + " of " + size);
        }
      }
      buffer.position(0).limit(wanted);
      whole = true;
      return buffer;
    } finally {
      if (!whole) {
        buffers.give(buffer);
      }
    }
  }

  @Override
  public void close() throws IOException {
    channel.close();
  }
}
