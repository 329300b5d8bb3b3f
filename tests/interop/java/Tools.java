import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.InputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import java.util.Scanner;
import org.apache.kafka.common.utils.Exit;

/** Runs the main methods of Kafka's tools, one for each line of standard input, in one JVM.
 *
 * A line is base64 words: the input of the tool, its class, its arguments.  The answer is a line
 * with the exit status and the output in base64.
 */
public class Tools {
    // The status and the output at the first exit: a tool may catch Exited, print it and exit again.
    static Integer exited;
    static byte[] output;
    static ByteArrayOutputStream bytes;
    static final List<Runnable> hooks = new ArrayList<>();

    static class Exited extends RuntimeException {
        Exited(int status) {
            super(null, null, false, false);
            if (exited == null) {
                exited = status;
                System.out.flush();
                output = bytes.toByteArray();
            }
        }
    }

    public static void main(String[] args) throws Exception {
        PrintStream answers = System.out;
        Scanner lines = new Scanner(System.in, "US-ASCII");
        Exit.setExitProcedure((status, message) -> {
            throw new Exited(status);
        });
        Exit.setHaltProcedure((status, message) -> {
            throw new Exited(status);
        });
        Exit.setShutdownHookAdder((name, hook) -> hooks.add(hook));
        while (lines.hasNextLine()) {
            String[] words = lines.nextLine().split(" ");
            for (int i = 0; i < words.length; i++)
                words[i] = new String(Base64.getDecoder().decode(words[i].substring(1)), StandardCharsets.UTF_8);
            bytes = new ByteArrayOutputStream();
            PrintStream out = new PrintStream(bytes, true, "UTF-8");
            InputStream in = new ByteArrayInputStream(words[0].getBytes(StandardCharsets.UTF_8));
            System.setIn(in);
            System.setOut(out);
            System.setErr(out);
            exited = null;
            try {
                Class.forName(words[1]).getMethod("main", String[].class)
                    .invoke(null, (Object) Arrays.copyOfRange(words, 2, words.length));
            } catch (InvocationTargetException error) {
                if (!(error.getCause() instanceof Exited)) {
                    exited = 99;
                    error.getCause().printStackTrace(out);
                }
            }
            out.flush();
            if (exited == null)
                output = bytes.toByteArray();
            bytes.reset();
            for (Runnable hook : hooks)
                hook.run();
            hooks.clear();
            out.flush();
            byte[] last = bytes.toByteArray();
            output = Arrays.copyOf(output, output.length + last.length);
            System.arraycopy(last, 0, output, output.length - last.length, last.length);
            answers.println((exited == null ? 0 : exited) + " " + Base64.getEncoder().encodeToString(output));
            answers.flush();
        }
    }
}
